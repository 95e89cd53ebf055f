"""Spaces and the lifecycle of their streams: routing, rollover, retention, compaction and tiering."""
