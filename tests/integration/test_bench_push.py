"""The benches of push run, and write their figures: with numbers so small that these mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import latency, push_cost, subscriptions, volume
from bench.peers.known import SYSTEMS


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """Options that say where the results go."""
    return ("--json", str(tmp_path / "result.json"), "--page", str(tmp_path / "page.md"))


def result(files: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(files[1]).read_text())
    return found


QUICK = ("--rounds", "1", "--seconds", "0.5", "--warm-up", "0.2")


def test_latency_of_polling_beside_redis(files: tuple[str, ...]) -> None:
    check_latency(("sublet-poll", "redis-everysec"), files)
    assert "## From publish to consume, beside peers\n" in Path(files[3]).read_text()


@pytest.mark.long
def test_latency_of_nats(files: tuple[str, ...]) -> None:
    check_latency(("nats-always", "nats-default-pull"), files)


def check_latency(systems: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Each is measured that is installed."""
    latency.main([*QUICK, "--rates", "2000", "--systems", *systems, *files])
    there = [SYSTEMS[key].name for key in systems if SYSTEMS[key].missing() is None]
    figures = result(files)["figures"]
    assert [one["system"] for one in figures] == there
    assert all(0 < one["p50_ms"] <= one["p99_ms"] for one in figures)


@pytest.mark.long
def test_cost_of_push(files: tuple[str, ...]) -> None:
    push_cost.main(["--driver", "poll", "--messages", "2000", "--calls", "100", "--rounds", "1", *files])
    assert all(claim["ratio"] > 0 for claim in result(files)["claims"])
    assert "## What push costs a publisher\n" in Path(files[3]).read_text()


@pytest.mark.long
def test_cost_of_push_that_processes_hear(files: tuple[str, ...]) -> None:
    push_cost.main(["--messages", "2000", "--calls", "100", "--rounds", "1", "--listeners", "2", *files])
    claims = result(files)["claims"]
    assert [claim["what"] for claim in claims if "heard" in claim["what"]] == [
        "publish_batch of 1000: push, heard / none",
        "publish message by message: push, heard / none",
    ]
    assert all(claim["ratio"] > 0 for claim in claims)


@pytest.mark.long
def test_memory_of_subscriptions(files: tuple[str, ...]) -> None:
    subscriptions.main(["--sizes", "100", "200", "--each", "20", "--largest-calls", "100", "--rounds", "1", *files])
    small, large = result(files)["curve"]
    assert (small["subscriptions"], small["agents"]) == (100, 5)
    assert small["call"]["idle_agent_bytes"] > 0
    assert large["session"]["idle_agent_bytes"] > 0
    assert "call" not in large
    assert "## Memory of subscriptions and idle agents\n" in Path(files[3]).read_text()


def test_what_the_server_is_asked_for(files: tuple[str, ...]) -> None:
    volume.main(["--messages", "2000", "--idle", "0.2", *files])
    found = {one["what"]: one for one in result(files)["figures"]}
    assert found["WAL of a message, blocks of 1"]["ratio"] > found["WAL of a message, blocks of 1,000"]["ratio"] > 1
    assert found["connections named 'sublet reader'"]["value"] == 1
    assert "## What the server is asked for\n" in Path(files[3]).read_text()
