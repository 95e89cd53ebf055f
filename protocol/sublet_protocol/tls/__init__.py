"""TLS: its files, read again when they change, and credentials for servers and channels."""
