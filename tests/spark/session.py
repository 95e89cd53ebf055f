"""How the tests start Spark: quickly, quietly, and with Python workers that find the tests' modules."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
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


def to_its_end(writer: Any, checkpoint: Path, timeout_s: float = 360.0) -> Any:
    """The query, which has had what there is."""
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert query.awaitTermination(int(timeout_s)), f"the query has not ended: {query.status}"
    return query
