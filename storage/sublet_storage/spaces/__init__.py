"""Spaces and the life of their streams: routing, rollover, retention, compaction and tiering."""
