"""Micro-batches planned ahead, for engines such as Spark that name a batch before they read it."""
