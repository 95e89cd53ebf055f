"""What a node does for the database beside leading: its registration, housekeeping, the outbox."""
