"""Connections, transactions and the database's clock: what every other room uses to talk to Postgres."""
