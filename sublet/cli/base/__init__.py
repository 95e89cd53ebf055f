"""Options, exit codes, output, logs and lazy loading, shared by all commands."""
