"""TLS: the files that it takes, read again when they change, and what servers and channels to nodes are made with."""
