"""Each hour's flights are added up by many consumers and closed exactly once: see README.md beside this.

`consumer` is what one copies; `__main__` plays the world around it, kills included, and checks what came of it.
"""
