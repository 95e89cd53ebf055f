"""The rows of the group tables as plain values, and the rules of what may become of them. No I/O."""
