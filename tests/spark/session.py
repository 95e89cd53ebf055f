"""How the tests start Spark: quickly, quietly, and with Python workers that find the tests' modules."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from sublet.demo.java import find_java_home
from tools.source_path import source_path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
SITE_CUSTOMIZE = """
# The installed pyspark, compiled once, instead of the zip that every Python worker would compile anew.
import sys
sys.path[:] = [path for path in sys.path if not path.endswith(("/pyspark.zip", "-src.zip"))]
"""
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Starts quickly: a test's JVM does not live long enough for its best compiler to pay."""
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.driver.extraJavaOptions": f"{QUICK_JAVA} -Xss8m",
    "spark.executor.extraJavaOptions": QUICK_JAVA,
    "spark.log.level": "OFF",
}
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


def quick_path(place: Path) -> str:
    """A PYTHONPATH for Spark's workers, with a `sitecustomize` that is written to the directory `place`."""
    (place / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    return os.pathsep.join((str(place), source_path(ROOT)))


def spark_session(master: str, settings: Mapping[str, str] | None = None, *, remote: bool = False) -> Any:
    """A session of this process, its environment changed for Spark's workers; `settings` come on top of `SETTINGS`.

    `remote`: through a Spark Connect server, which is started.
    """
    os.environ["JAVA_HOME"] = str(find_java_home(CACHE))
    os.environ["PYTHONPATH"] = quick_path(Path(tempfile.mkdtemp(prefix="sublet-site-")))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote(master) if remote else SparkSession.builder.master(master)
    builder = builder.appName("sublet tests")
    for key, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def streamed(spark: Any, name: str, filter: str, schema: str | None = None, **options: object) -> Any:
    """A streaming frame of the group $share/NAME/FILTER, from its beginning; the session has that name, too."""
    wanted = {"subscription": f"$share/{name}/{filter}", "sessionName": name, "startingPosition": "earliest"} | options
    reader = spark.readStream.format("sublet").options(**wanted)
    return (reader.schema(schema) if schema else reader).load()


def to_its_end(writer: Any, checkpoint: Path) -> Any:
    """The query, which has had what there is."""
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert query.awaitTermination(360), f"the query has not ended: {query.status}"
    return query


def java_options(cache: Path) -> str:
    """Options that make Java use what it has read of Spark's classes before, kept in that directory: a JVM starts in
    half the time with it. Who comes first has it made and does not wait for it: until it is there, and where that
    fails, Java starts as it would without."""
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
