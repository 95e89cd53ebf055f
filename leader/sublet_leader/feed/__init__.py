"""Publishing and reading through a node, for clients that cannot reach the database."""
