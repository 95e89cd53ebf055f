"""A streaming query is replaced by its next version without a gap: see README.md beside this.

`query` is what one copies; `__main__` deploys version 2 beside version 1, stops version 1, measures and counts.
"""
