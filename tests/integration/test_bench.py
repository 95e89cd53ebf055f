"""The benches run, and write their figures: with numbers so small that these mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import allocation, epochs, handover, node, operate, takeover
from tests.kit_nodes import ROOT
from tests.spark.java_archive import java_options
from tests.spark.session import CACHE

QUICK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss8m",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""Spark starts quickly then, and is slow at what takes long."""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page that has another bench's section."""
    page = tmp_path / "bench.md"
    page.write_text("# What was measured\n\nIntroduction.\n\n## The log: publish and consume\n\nProse.\n\n| table |\n")
    return page


def arguments(page: Path, *options: str) -> list[str]:
    return [*options, "--json", str(page.with_suffix(".json")), "--page", str(page)]


def figures(page: Path) -> dict[str, Any]:
    assert "## The log: publish and consume\n\nProse.\n\n| table |\n" in page.read_text()
    written: dict[str, Any] = json.loads(page.with_suffix(".json").read_text())
    assert written["machine"]["cpus"]
    return written


def test_allocation(page: Path) -> None:
    allocation.main(arguments(page, "--streams", "200", "--borrowers", "20", "--rounds", "1"))
    assert len(figures(page)["plans"]) == 5
    assert "## Allocation: who gets which stream\n" in page.read_text()


@pytest.mark.long
def test_handover(page: Path) -> None:
    handover.main(arguments(page, "--moves", "1", "--streams", "3"))
    found = figures(page)
    assert found["settings"]["moves"] >= 1
    assert all(figure["value"] > 0 and figure["beside"] > 0 for figure in found["figures"])
    assert "## Graceful hand-over\n" in page.read_text()


@pytest.mark.long
def test_takeover(page: Path) -> None:
    takeover.main(arguments(page, "--kills", "1", "--speed", "4"))
    found = figures(page)
    assert found["published"] > 0
    assert (found["lost"], found["repeated"]) == (0, 0)
    assert all(figure["value"] > 0 for figure in found["figures"])
    assert "## Takeover of a killed leader\n" in page.read_text()


@pytest.mark.long
def test_node(page: Path) -> None:
    sizes = ("--borrowers", "40", "--lendings", "400", "--groups", "4")
    node.main(arguments(page, *sizes, "--leaderships", "5", "--entries", "20", "40", "--rounds", "1"))
    assert all(figure["value"] > 0 and figure["beside"] > 0 for figure in figures(page)["figures"])
    assert "## A node that holds many borrowers\n" in page.read_text()


@pytest.mark.long
def test_epochs(page: Path) -> None:
    small = ("--messages", "4000", "--paces", "1000", "--batch-bytes", "150000", "--streams", "20")
    epochs.main(arguments(page, *small, "--rounds", "1", "--statement-rounds", "1"))
    found = figures(page)
    assert len(found["claims"]) == 2
    assert all(claim["ratio"] > 0 for claim in found["claims"])
    assert len(found["figures"]) == 6
    assert all(figure["value"] > 0 and figure["beside"] > 0 for figure in found["figures"])
    written = page.read_text()
    assert "## What epochs cost\n" in written
    assert "| renewal, all behind, each elsewhere |" in written


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.long
def test_spark(page: Path) -> None:
    small = ("--rows", "4000", "--batch-rows", "1500", "--table-rows", "200", "--streams", "2", "--blocks", "500")
    few = (
        "--rounds",
        "1",
        "--micro-batches",
        "2",
        "--warm-up",
        "1",
        "--conf",
        *(f"{key}={QUICK[key]}" for key in QUICK),
    )
    # In a process of its own: one process has one Spark, and the tests of this one may have another.
    command = [sys.executable, "-m", "bench", "spark", *arguments(page, *small, *few)]
    environment = {**os.environ, "JDK_JAVA_OPTIONS": java_options(CACHE)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures(page)
    assert len(found["claims"]) == 8
    assert all(claim["ratio"] > 0 for claim in found["claims"])
    assert found["figures"][0]["what"] == "a micro-batch"
    assert all(figure["value"] > 0 and figure["beside"] > 0 for figure in found["figures"][:2])
    assert "## Spark\n" in page.read_text()


def test_operate(page: Path) -> None:
    operate.main(arguments(page, "--groups", "20", "--streams", "10", "--rounds", "1"))
    assert len(figures(page)["figures"]) == 13
    assert "## What an operator waits for\n" in page.read_text()
