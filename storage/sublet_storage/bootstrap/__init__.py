"""From nothing to a database that is ready: the given one or an embedded one, and its migrations."""
