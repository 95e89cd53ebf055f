"""Reading the log without a group: live tails, whole epochs, and ranges of offsets for batch jobs."""
