"""A streaming query publishes what it makes of flights, and its driver is killed: see README.md beside this.

`query` is what one copies; `__main__` kills it, starts it again from its checkpoint, and counts what came out.
"""
