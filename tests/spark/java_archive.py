"""What Java has read of Spark's classes, kept for the next: a JVM of a test starts in half the time with it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from sublet.demo.java import find_java_home

PROGRAM = """
import os
import sys

from pyspark.sql import SparkSession

draft, archive = sys.argv[1:]
options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:ArchiveClassesAtExit=" + draft
builder = SparkSession.builder.master("local[1]").config("spark.driver.extraJavaOptions", options)
spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1").getOrCreate()
rows = spark.range(9).groupBy("id").count()
assert rows.count() == len(rows.collect()) == 9
assert spark.range(9).mapInArrow(lambda batches: batches, "id long").count() == 9
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()
java.wait()
os.rename(draft, archive)
"""


def java_options(cache: Path) -> str:
    """Options that make Java use the archive in that directory. Who comes first has it made and does not wait for it:
    until it is there, and where that fails, Java starts as it would without."""
    java, pyspark = find_java_home(cache), importlib.metadata.version("pyspark")
    release = (java / "release").read_bytes() if (java / "release").exists() else b""
    key = sha256(b"\0".join([str(java).encode(), release, pyspark.encode()])).hexdigest()[:16]
    archive = cache / f"spark-{key}.jsa"
    cache.mkdir(exist_ok=True)
    if not archive.exists():
        _make(archive, java)
    return f"-Xlog:disable -XX:SharedArchiveFile={archive}"


def _make(archive: Path, java: Path) -> None:
    """Beside what goes on; once, however many ask for it at the same time: the lock is its process's."""
    lock = open(archive.with_suffix(".lock"), "w")  # noqa: SIM115 - the process that is started holds it on
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    environment = {**os.environ, "JAVA_HOME": str(java), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-c", PROGRAM, str(archive.with_suffix(".draft")), str(archive)]
    nothing = subprocess.DEVNULL
    subprocess.Popen(
        command,
        env=environment,
        pass_fds=(lock.fileno(),),
        start_new_session=True,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
    )
