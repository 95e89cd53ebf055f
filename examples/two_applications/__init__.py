"""Two Spark applications share one group, three to one, until one of them stops: see README.md beside this.

`application` is what one copies; `__main__` starts it twice, looks at who holds what, and counts.
"""
