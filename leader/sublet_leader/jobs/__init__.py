"""Background jobs of a node: its registration, maintenance of the database, and the outbox relay."""
