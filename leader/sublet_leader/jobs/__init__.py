"""Background jobs of a node: its registration, its lock, maintenance of the database, and the outbox relay."""
