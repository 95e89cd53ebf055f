"""Observability of a node: health, metrics, lag history, log lines of events."""
