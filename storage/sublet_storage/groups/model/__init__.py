"""Rows of the group tables as plain values, and the rules for changing them, without I/O."""
