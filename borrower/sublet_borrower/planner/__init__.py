"""Sessions that plan micro-batches ahead, for engines such as Spark that name a batch before they read it."""
