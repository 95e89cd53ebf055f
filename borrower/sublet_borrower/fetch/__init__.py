"""Fetching messages for a session, from the database or from nodes."""
