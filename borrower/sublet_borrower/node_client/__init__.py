"""Clients that reach sublet through nodes alone: publish, read and watch without a database."""
