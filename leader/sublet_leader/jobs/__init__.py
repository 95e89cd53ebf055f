"""Background jobs of a node: registration, advisory lock, access reader, maintenance, outbox relay."""
