"""`sublet publish`, `tail` and `consume`."""
