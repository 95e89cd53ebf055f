"""The Spark program of the README as printed, beside files of its user's own that are named as our folders are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.demo.java import find_java_home
from sublet_storage.producer import Publisher
from tests import kit_nodes
from tests.integration.test_readme import write_user_files
from tests.readme import environment, programs
from tests.spark.session import CACHE, QUICK_JAVA, quick_path
from tests.spark.stage import SPEED, Stage

pytestmark = pytest.mark.spark

FIXED_TIME = "consumption.wait(60)"
UNTIL_DONE = "while consumption.status().message_count < 200 and not consumption.wait(0.2): pass"
"""What a reader sees in time, a loaded machine may not: it takes as long as it takes, and no longer."""


@pytest.mark.long
def test_spark_program_consumes_what_is_there(stage: Stage, tmp_path: Path) -> None:
    write_user_files(tmp_path)
    _, program = programs()
    assert program.count(FIXED_TIME) == 1
    (tmp_path / "job.py").write_text(program.replace(FIXED_TIME, UNTIL_DONE))
    stage.serve("n1")
    with Publisher(stage.url) as publisher:
        for number in range(200):
            publisher.publish("orders/eu", str(number), key=str(number))
    # As with an activated virtual environment: its Python is the one that Spark's workers run, too.
    spark = {
        "JAVA_HOME": str(find_java_home(CACHE)),
        "JAVA_TOOL_OPTIONS": QUICK_JAVA,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": quick_path(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=kit_nodes.environment(SPEED, environment(stage.url)) | spark,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "200 messages consumed" in done.stdout
    assert sum(map(int, re.findall(r"stream \d+: (\d+) messages", done.stdout))) == 200
