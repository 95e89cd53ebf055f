"""What is known about a node while it runs: health, metrics, lag history, log lines of events."""
