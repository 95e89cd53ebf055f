"""The benches run, and write their figures: with numbers so small that these mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import (
    allocation,
    decode,
    epochs,
    faults,
    handover,
    latency,
    node,
    operate,
    push_cost,
    subscriptions,
    takeover,
    tls,
    volume,
)
from bench.peers.known import SYSTEMS
from tests.kit_nodes import ROOT
from tests.spark.session import CACHE, java_options

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


def figures(page: Path, heading: str) -> dict[str, Any]:
    """Return the report of a bench; assert that it has its section, and figures above 0."""
    assert "## The log: publish and consume\n\nProse.\n\n| table |\n" in page.read_text()
    assert f"## {heading}\n" in page.read_text()
    written: dict[str, Any] = json.loads(page.with_suffix(".json").read_text())
    assert written["machine"]["cpus"]
    assert all(claim["ratio"] > 0 for claim in written.get("claims", ()))
    assert all(each.get("value", 1) > 0 and each.get("beside", 1) > 0 for each in written.get("figures", ()))
    return written


NODE = "--borrowers 40 --lendings 400 --groups 4 --leaderships 5 --entries 20 40 --rounds 1"
EPOCHS = "--messages 4000 --paces 1000 --batch-bytes 150000 --streams 20 --rounds 1 --statement-rounds 1"
FAULTS = "--rounds 1 --rate 100 --seconds 3 --faults restart killed-consumers"
PUSH = "--driver poll --messages 2000 --calls 100 --rounds 1"


@pytest.mark.parametrize(
    ("bench", "options", "heading", "parts"),
    [
        (allocation, "--streams 200 --borrowers 20 --rounds 1", "Allocation: who gets which stream", {"plans": 5}),
        (operate, "--groups 20 --streams 10 --rounds 1", "What an operator waits for", {"figures": 13}),
        (decode, "--messages 1 100 --rounds 3", "Validation of blocks", {"figures": 12}),
        (handover, "--moves 1 --streams 3", "Graceful hand-over", {}),
        (node, NODE, "A node that holds many borrowers", {}),
        (epochs, EPOCHS, "What epochs cost", {"figures": 6, "claims": 2}),
        (tls, "--messages 2000 --calls 20 --connections 3 --rounds 1", "What TLS costs", {"claims": 5}),
        (push_cost, PUSH, "What push costs a publisher", {}),
        (faults, FAULTS, "Faults, beside a queue in a table", {"figures": 4}),
    ],
    ids=["allocation", "operate", "decode", "handover", "node", "epochs", "tls", "push", "faults"],
)
@pytest.mark.long
def test_a_bench_writes_its_figures(
    page: Path, bench: ModuleType, options: str, heading: str, parts: dict[str, int]
) -> None:
    bench.main(arguments(page, *options.split()))
    found = figures(page, heading)
    assert {name: len(found[name]) for name in parts} == parts


@pytest.mark.long
def test_takeover(page: Path) -> None:
    takeover.main(arguments(page, "--kills", "1", "--speed", "4"))
    found = figures(page, "Takeover of a killed leader")
    assert found["published"] > 0
    assert (found["lost"], found["repeated"]) == (0, 0)


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.long
def test_spark(page: Path) -> None:
    small = ("--rows", "4000", "--batch-rows", "1500", "--table-rows", "200", "--streams", "2", "--blocks", "500")
    few = ("--rounds", "1", "--micro-batches", "2", "--warm-up", "1", "--conf", *map("=".join, QUICK.items()))
    # In a process of its own: one process has one Spark, and the tests of this one may have another.
    command = [sys.executable, "-m", "bench", "spark", *arguments(page, *small, *few)]
    environment = {**os.environ, "JDK_JAVA_OPTIONS": java_options(CACHE)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = figures(page, "Spark")
    assert len(found["claims"]) == 8
    assert found["figures"][0]["what"] == "a micro-batch"


# --- push -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "systems",
    [
        pytest.param(("sublet-poll", "redis-everysec"), id="redis"),
        pytest.param(("nats-always", "nats-default-pull"), id="nats"),
        pytest.param(("sublet-postgres-spark",), id="spark", marks=[pytest.mark.spark, pytest.mark.timeout(300)]),
    ],
)
@pytest.mark.long
def test_latency(page: Path, systems: tuple[str, ...]) -> None:
    """Each is measured that is installed."""
    quick = ("--rounds", "1", "--seconds", "0.5", "--warm-up", "0.2", "--rates", "2000")
    latency.main(arguments(page, *quick, "--systems", *systems))
    found = figures(page, "From publish to consume, beside peers")["figures"]
    assert [one["system"] for one in found] == [SYSTEMS[key].name for key in systems if SYSTEMS[key].missing() is None]
    assert all(0 < one["p50_ms"] <= one["p99_ms"] for one in found)


@pytest.mark.long
def test_cost_of_push_that_processes_receive(page: Path) -> None:
    push_cost.main(arguments(page, "--messages", "2000", "--calls", "100", "--rounds", "1", "--listeners", "2"))
    claims = figures(page, "What push costs a publisher")["claims"]
    assert [claim["what"] for claim in claims if "received" in claim["what"]] == [
        "publish_batch of 1000: push, received / none",
        "publish message by message: push, received / none",
    ]


@pytest.mark.long
def test_memory_of_subscriptions(page: Path) -> None:
    small = "--sizes 100 200 --each 20 --largest-calls 100 --rounds 1"
    subscriptions.main(arguments(page, *small.split()))
    few, many = figures(page, "Memory of subscriptions and idle agents")["curve"]
    assert (few["subscriptions"], few["agents"]) == (100, 5)
    assert few["call"]["idle_agent_bytes"] > 0
    assert many["session"]["idle_agent_bytes"] > 0
    assert "call" not in many


@pytest.mark.long
def test_what_the_server_is_asked_for(page: Path) -> None:
    volume.main(arguments(page, "--messages", "2000", "--idle", "0.2"))
    found = {one["what"]: one for one in figures(page, "What the server is asked for")["figures"]}
    assert found["WAL of a message, blocks of 1"]["ratio"] > found["WAL of a message, blocks of 1,000"]["ratio"] > 1
    assert found["connections named 'sublet reader'"]["value"] == 1
