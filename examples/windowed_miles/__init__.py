"""A streaming query adds up the miles of each hour and airport, into Parquet files: see README.md beside this.

`query` is what one copies; `__main__` publishes flights, and compares the files with the data.
"""
