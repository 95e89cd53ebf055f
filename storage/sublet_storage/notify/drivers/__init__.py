"""Drivers of notifications between processes: polling, Postgres, ZeroMQ, or a plug-in."""
