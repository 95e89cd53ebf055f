"""`sublet leader`, `migrate`, `doctor` and `demo`."""
