"""Reading the log without a group: live tails, entire epochs, and offset ranges."""
