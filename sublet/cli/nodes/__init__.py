"""`sublet nodes`: which there are, and draining one."""
