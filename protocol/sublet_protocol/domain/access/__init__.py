"""Access: which principal may do what, and the tokens that prove who it is; pure."""
