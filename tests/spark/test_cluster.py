"""The job of docs/spark-cluster.md on a cluster: workers that have nothing but what it brings, and lose executors."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pyspark
import pytest

from sublet.demo.java import find_java_home
from sublet_storage.producer import Publisher
from tests import kit_nodes
from tests.kit import eventually
from tests.readme import environment, programs
from tests.spark.cluster import a_cluster, kill_all, pack_environment, zip_code
from tests.spark.session import CACHE, QUICK_JAVA
from tests.spark.stage import SPEED, WAIT_S, Stage

pytestmark = pytest.mark.spark

PAGE = "docs/spark-cluster.md"
SETTINGS = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    "spark.executor.extraJavaOptions": QUICK_JAVA,
    "spark.speculation": "true",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


class Job:
    """The page's job, submitted from a directory that has its environment unpacked, and what it has written."""

    def __init__(self, stage: Stage, place: Path, *arguments: str, python: str) -> None:
        self._place = place
        (job,) = programs(PAGE)
        (place / "job.py").write_text(job)
        variables = kit_nodes.environment(SPEED, environment(stage.url)) | {
            "JAVA_HOME": str(find_java_home(CACHE)),
            "PYSPARK_DRIVER_PYTHON": python,
            "PYTHONPATH": "sublet.zip",  # and not the code of this checkout
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        settings = [part for name, value in SETTINGS.items() for part in ("--conf", f"{name}={value}")]
        command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), *settings, *arguments, "job.py"]
        self._log = place / "job.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=place, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def output(self) -> str:
        """What a task of Python's has failed with first, if one has, and the end of what it has said."""
        said = self._log.read_text(errors="replace")
        return said[said.find("Traceback") :][:4000] + said[-2000:]

    def values(self) -> list[int]:
        """All rows of the batches that Spark counts as written."""
        found: list[int] = []
        for batch in (self._place / "billing" / "_spark_metadata").glob("[0-9]*"):
            for line in batch.read_text().splitlines()[1:]:
                table = pq.read_table(json.loads(line)["path"].removeprefix("file://"))
                found += [int(value) for value in table.column("order").to_pylist()]
        return sorted(found)

    def close(self) -> None:
        kill_all(self._process)


def publish(stage: Stage, first: int, count: int) -> None:
    with Publisher(stage.url, block_messages=20) as publisher:
        for number in range(first, first + count):
            publisher.publish(f"orders/{number % 5}", b"%d" % number, key=b"k%d" % (number % 97))


def _command(process: psutil.Process) -> str:
    """What it was started with; nothing of one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def java(words: str, under: psutil.Process) -> psutil.Process:
    """One of the JVMs below a process that run this class."""
    found = [one for one in under.children(recursive=True) if words in _command(one)]
    return found[0]


@pytest.mark.long
@pytest.mark.conforms("E25", "E27")
def test_job_on_a_cluster_survives_kills(stage: Stage, tmp_path: Path) -> None:
    """Workers have only what the job brings; an executor is killed, then a worker."""
    stage.serve("n1")
    pack_environment(tmp_path / "packed.tar.gz")
    zip_code(tmp_path / "sublet.zip")
    with tarfile.open(tmp_path / "packed.tar.gz") as archive:
        trusted: Any = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}  # since 3.11.4
        archive.extractall(tmp_path / "environment", **trusted)
    python = "environment/bin/python"
    with a_cluster(tmp_path) as master:
        arguments = ["--master", master, "--py-files", "sublet.zip", "--archives", "packed.tar.gz#environment"]
        arguments += ["--conf", f"spark.pyspark.python={python}"]
        with closing(Job(stage, tmp_path, *arguments, python=python)) as job:
            publish(stage, 0, 300)
            eventually(lambda: job.values() == list(range(300)), 4 * WAIT_S, job.output)
            java("CoarseGrainedExecutorBackend", psutil.Process(os.getpid())).kill()
            publish(stage, 300, 300)
            eventually(lambda: job.values() == list(range(600)), 4 * WAIT_S, job.output)
            java("deploy.worker.Worker", psutil.Process(os.getpid())).kill()
            publish(stage, 600, 300)
            eventually(lambda: len(job.values()) >= 900, 4 * WAIT_S, job.output)
            assert job.values() == list(range(900))
