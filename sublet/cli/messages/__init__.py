"""`sublet publish`, `tail` and `consume`: messages from and to the terminal."""
