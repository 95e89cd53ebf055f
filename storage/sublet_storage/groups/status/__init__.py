"""Reading the state of groups: members, lag, and why a stream stands still."""
