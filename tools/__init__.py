"""What keeps the repository honest; never installed."""
