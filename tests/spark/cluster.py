"""A standalone Spark cluster out of the wheel, each worker a host of its own, and the code that a job brings to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from sublet.demo.java import find_java_home
from tests.kit import eventually
from tests.kit_nodes import ROOT
from tests.spark.session import CACHE, QUICK_JAVA

HOSTS = ("127.0.0.1", "127.0.0.2")
"""Spark starts no second attempt of a task on the host that runs the first: loopback has many addresses."""
LEFT_OUT = {"pyspark", "py4j", "sublet"}
"""Spark brings its own, and of ours the test sends the code apart."""
SPARED = {"__pycache__", "include", "tests"}
PACKAGES = (
    "borrower/pyspark_sublet",
    "borrower/sublet_borrower",
    "leader/sublet_leader",
    "protocol/sublet_protocol",
    "storage/sublet_storage",
    "sublet",
)


@contextmanager
def a_cluster(directory: Path) -> Iterator[str]:
    """A master, and a worker of one core on each host; the master's URL."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        log = directory / "master.log"
        arguments = ["--host", HOSTS[0], "--port", "0", "--webui-port", "0"]
        processes.append(_launch("master.Master", arguments, log))
        url = eventually(lambda: _found(log, "Starting Spark master at "), 60, log.read_text)
        for host in HOSTS:  # an application may come before they are there: it waits for them
            log = directory / f"worker-{host}.log"
            arguments = ["--host", host, "--port", "0", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
            processes.append(_launch("worker.Worker", [*arguments, "--work-dir", str(directory / host), url], log))
        yield url
    finally:
        for process in processes:
            kill_all(process)


def _launch(role: str, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    import pyspark

    spark_home, java = Path(pyspark.__file__).parent, find_java_home(CACHE)
    # The executors' environment is the application's, not that of the test.
    clean = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_", "PYTHONPATH"))
    }
    settings = {
        "JAVA_HOME": str(java),
        "SPARK_HOME": str(spark_home),
        "SPARK_LOCAL_IP": HOSTS[0],
        "SPARK_SCALA_VERSION": "2.13",  # as Spark's own script says, which starts a JVM more to find the rest
    }
    command = [str(java / "bin" / "java"), *QUICK_JAVA.split(), "-cp", str(spark_home / "jars" / "*")]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, f"org.apache.spark.deploy.{role}", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, **settings},
        )


def _found(log: Path, words: str) -> str:
    """What follows these words in the log, once they are there."""
    text = log.read_text(errors="replace")
    return text.partition(words)[2].split()[0] if words in text and text.endswith("\n") else ""


def kill_all(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and what it has started ends meanwhile
        parent = psutil.Process(process.pid)
        for one in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def pack_environment(target: Path) -> None:
    """A relocatable environment with the packages of `sublet[spark]`."""
    site = Path(sysconfig.get_path("purelib"))
    inside = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    home = Path(sys.executable).resolve()
    config = target.parent / "pyvenv.cfg"
    config.write_text(f"home = {home.parent}\ninclude-system-site-packages = false\n")
    link = target.parent / "python"
    link.symlink_to(home)
    with tarfile.open(target, "w:gz", compresslevel=0) as archive:
        archive.add(config, "pyvenv.cfg")
        archive.add(link, "bin/python")
        for name in sorted(_needed("sublet", {"spark"})):
            for file in distribution(name).files or ():
                path = Path(str(distribution(name).locate_file(file))).resolve()
                if path.is_relative_to(site.resolve()) and path.is_file() and not SPARED.intersection(path.parts):
                    archive.add(path, f"{inside}/{path.relative_to(site.resolve())}")


def zip_code(target: Path) -> None:
    """What a wheel of sublet has."""
    with zipfile.ZipFile(target, "w") as archive:
        for package in PACKAGES:
            for file in sorted((ROOT / package).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, file.relative_to((ROOT / package).parent))


def _needed(name: str, extras: set[str]) -> set[str]:
    """Names of the distributions that it needs, and what these need."""
    found: set[str] = set()
    for text in distribution(name).requires or ():
        required = Requirement(text)
        wanted = required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in extras | {""})
        if wanted and required.name not in LEFT_OUT:
            found |= {required.name} | _needed(required.name, set(required.extras))
    return found
