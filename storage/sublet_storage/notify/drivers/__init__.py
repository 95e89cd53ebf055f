"""How notifications travel from process to process: by polling, by Postgres, by ZeroMQ, or by a plug-in."""
