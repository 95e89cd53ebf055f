"""What anybody may read about groups: members, lag, and why a stream does not move."""
