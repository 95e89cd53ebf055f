"""Sessions that plan micro-batches ahead, for engines that name a batch before reading it."""
