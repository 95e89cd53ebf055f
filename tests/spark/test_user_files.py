"""A Spark job beside files of its user's own whose names are those of our folders, on the driver and in its tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sublet.demo.java import java_home
from sublet_storage.producer import Publisher
from tests import kit_nodes
from tests.integration.test_user_files import write_user_files
from tests.readme import environment, programs
from tests.spark.session import CACHE, QUICK_JAVA, quick_path
from tests.spark.stage import SPEED, Stage
from tests.spark.test_readme import FIXED_TIME, UNTIL_DONE

pytestmark = pytest.mark.spark


@pytest.mark.timeout(300)
def test_a_spark_job_runs_beside_files_named_as_our_folders(stage: Stage, tmp_path: Path) -> None:
    write_user_files(tmp_path)
    _, program = programs()
    (tmp_path / "job.py").write_text(program.replace(FIXED_TIME, UNTIL_DONE))
    stage.serve("n1")
    with Publisher(stage.url) as publisher:
        for number in range(200):
            publisher.publish("orders/eu", str(number), key=str(number))
    spark = {
        "JAVA_HOME": str(java_home(CACHE)),
        "JAVA_TOOL_OPTIONS": QUICK_JAVA,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": quick_path(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=kit_nodes.environment(SPEED, environment(stage.url)) | spark,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "200 messages consumed" in done.stdout
