"""Development tools of the repository: generated pages, checks and planted faults; never installed."""
