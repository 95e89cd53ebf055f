"""What a session was granted, and how far it has come in each stream."""
