"""The package by which Spark finds the data source `format("sublet")`.

Spark looks for a `DefaultSource` in packages whose names begin with `pyspark_`, so `spark.readStream.format("sublet")`
works wherever sublet is installed. Every Spark session that uses any Python data source imports this package, so it
loads nothing but the name.
"""

from __future__ import annotations

from sublet_borrower.spark.format import DefaultSource

__all__ = ["DefaultSource"]
