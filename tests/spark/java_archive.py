"""What Java has read of Spark's classes, kept for the next: a JVM of a test starts in half the time with it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from borrower.spark.java import java_home

LONGEST_S = 120
PROGRAM = """
import sys
from pyspark.sql import SparkSession

options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit=" + sys.argv[1]
builder = SparkSession.builder.master("local[1]").config("spark.driver.extraJavaOptions", options)
spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1").getOrCreate()
rows = spark.range(9).groupBy("id").count()
assert rows.count() == len(rows.collect()) == 9
assert spark.range(9).mapInArrow(lambda batches: batches, "id long").count() == 9
"""


def java_options(cache: Path) -> str:
    """Options that make Java use the archive in that directory. It is made by whoever comes first; where that fails,
    there is none, and Java starts as it would without."""
    java, pyspark = java_home(cache), importlib.metadata.version("pyspark")
    release = (java / "release").read_bytes() if (java / "release").exists() else b""
    key = sha256(b"\0".join([str(java).encode(), release, pyspark.encode()])).hexdigest()[:16]
    archive = cache / f"spark-{key}.jsa"
    cache.mkdir(exist_ok=True)
    with open(cache / "spark.jsa.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _make(archive, java)
    return f"-Xlog:disable -XX:SharedArchiveFile={archive}"


def _make(archive: Path, java: Path) -> None:
    draft = archive.with_suffix(".draft")
    environment = {**os.environ, "JAVA_HOME": str(java), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", PROGRAM, str(draft)]
    subprocess.run(command, env=environment, check=False, capture_output=True, timeout=LONGEST_S)
    if draft.exists():
        draft.rename(archive)
