"""`sublet spaces`: create, alter, reshard and drop."""
