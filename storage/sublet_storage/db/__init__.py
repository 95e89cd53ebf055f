"""Connections, transactions and the database's clock, used by every other folder of storage."""
