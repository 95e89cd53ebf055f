"""The machine of a node, which runs many groups' leaders, and its database thread."""
