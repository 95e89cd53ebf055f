"""Spark tasks store flights in a table, each exactly once, whoever is killed meanwhile: see README.md beside this.

`application` is what one copies; `__main__` plays the world around it, kills included, and counts.
"""
