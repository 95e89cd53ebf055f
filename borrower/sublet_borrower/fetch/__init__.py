"""How messages reach a session: read from the database, or from nodes."""
