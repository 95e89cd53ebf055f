"""Where Spark finds sublet: it looks through the packages whose names begin with pyspark_ for a `DefaultSource`.

So `spark.readStream.format("sublet")` works wherever sublet is installed, without a line of registration. Every Spark
session that uses any Python data source imports this, so it loads nothing that is not needed to say its name.
"""

from __future__ import annotations

from sublet_borrower.spark.format import DefaultSource

__all__ = ["DefaultSource"]
