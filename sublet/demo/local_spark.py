"""Creates a Spark session on this machine for tasks that run until they are drained."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from sublet.demo.java import find_java_home
from sublet_protocol.domain.errors import Unavailable

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss8m",
    "spark.log.level": "ERROR",
}
_ATTEMPTS = 1000
"""Maximum number of failures of a task: a killed task is restarted without a limit."""


def open_local_session(name: str, slots: int, cache_dir: Path | str = ".cache") -> Any:
    """Return a SparkSession with `slots` task slots in one JVM; Java comes from `find_java_home(cache_dir)`.

    Raise `Unavailable` if there is no Spark, or no Java and none can be installed.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise Unavailable("pyspark is not installed. Run `pip install 'sublet[spark]'`.")
    os.environ["JAVA_HOME"] = str(find_java_home(cache_dir))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{slots},{_ATTEMPTS}]").appName(name)
    for key, value in _SETTINGS.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
