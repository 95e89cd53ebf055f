"""The demo's checker finds what is planted, and the demo says in words what it saw."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from msgspec import structs
from msgspec.structs import asdict

from sublet.demo import delivery_check, flights, runner
from sublet.demo.delivery_check import (
    DeliveryCheckResult,
    DeliveryRecord,
    KillRecord,
    check_deliveries,
    read_delivered_batches,
)
from sublet.demo.display import DemoDisplay
from sublet.demo.holding_intervals import holding_intervals
from sublet.demo.takeover_reporter import TakeoverReporter
from sublet_protocol.domain.secret import Secret
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.groups.status.overview_model import GroupOverview

SOURCE = pa.table({"carrier": ["AA", "AA", "UA", "UA", "UA", "DL"], "distance": [10, 20, 30, 40, 50, 60]})
HEADS = {1: 4, 2: 2}
COMPLETE = [DeliveryRecord("a", 1, 7, (0, 1, 2, 3), (0, 1, 2, 3)), DeliveryRecord("b", 2, 8, (0, 1), (4, 5))]
KILLED = HistoryRecord(0, 1, 1, "force_release", "not reclaimed", 7, "b1", "host:41:x", 2, 1, True)
AGAIN = DeliveryRecord("b", 1, 9, (2, 3), (2, 3))
WORKER = 10**9
"""A process that there cannot be."""


def found(attempts: list[DeliveryRecord], history: list[HistoryRecord] | None = None) -> DeliveryCheckResult:
    return check_deliveries(SOURCE, HEADS, attempts, history or [])


def test_everything_once_is_sound() -> None:
    findings = found(COMPLETE)
    assert findings.is_ok
    assert (findings.published, findings.consumed, findings.lost, findings.duplicated) == (6, 6, 0, 0)
    assert findings.totals == {"AA": (2, 2, 30), "DL": (1, 1, 60), "UA": (3, 3, 120)}


def test_a_repeat_after_a_forced_move_is_explained() -> None:
    findings = found([*COMPLETE, AGAIN], [KILLED])
    assert findings.is_ok
    assert (findings.consumed, findings.duplicated, findings.explained_duplicates) == (6, 2, 2)
    (repeat,) = findings.duplicate_ranges
    assert repeat == {"stream_id": 1, "grant_id": 7, "from": 2, "to": 4, "messages": 2, "explained": True}


@pytest.mark.parametrize(
    ("attempts", "history", "wrong"),
    [
        ([COMPLETE[0]], [], {"lost": 2}),
        ([structs.replace(COMPLETE[0], offsets=(0, 1, 2), rows=(0, 1, 2)), COMPLETE[1]], [], {"lost": 1}),
        ([structs.replace(COMPLETE[0], rows=(0, 1, 2, 2)), COMPLETE[1]], [], {"lost": 1, "misplaced": 1}),
        ([structs.replace(COMPLETE[0], rows=(0, 1, 3, 2)), COMPLETE[1], AGAIN], [KILLED], {"misplaced": 4}),
        ([*COMPLETE, DeliveryRecord("b", 2, 8, (2,), (5,))], [], {"misplaced": 2}),
        ([*COMPLETE, AGAIN], [], {"duplicated": 2, "explained_duplicates": 0}),
        ([*COMPLETE, AGAIN], [replace(KILLED, is_forced=False)], {"duplicated": 2, "explained_duplicates": 0}),
        ([*COMPLETE, AGAIN], [replace(KILLED, position=3)], {"duplicated": 2, "explained_duplicates": 1}),
        ([*COMPLETE, AGAIN], [replace(KILLED, grant_id=6)], {"duplicated": 2, "explained_duplicates": 0}),
        ([*COMPLETE, AGAIN], [replace(KILLED, stream_id=2)], {"duplicated": 2, "explained_duplicates": 0}),
        ([COMPLETE[0], *COMPLETE], [KILLED], {"duplicated": 4, "explained_duplicates": 2}),
    ],
    ids=[
        "a stream was never read", "the last message is missing", "another row came in its place",
        "two rows changed places", "a message that nobody published", "a repeat without a move",
        "a repeat after a move that was not forced", "a repeat before the forced move's position",
        "a forced move of another grant", "a forced move of another stream", "one process had it twice",
    ],
)  # fmt: skip
def test_what_is_planted_is_found(
    attempts: list[DeliveryRecord], history: list[HistoryRecord], wrong: dict[str, int]
) -> None:
    findings = found(attempts, history)
    assert not findings.is_ok
    assert {name: getattr(findings, name) for name in wrong} == wrong


def test_totals_that_differ_are_not_sound() -> None:
    findings = found(COMPLETE)
    findings.totals["UA"] = (3, 2, 80)
    assert not findings.is_ok


@pytest.mark.parametrize(("share", "sound"), [(0.29, False), (0.3, True), (0.7, True), (0.71, False)])
def test_a_kill_outside_of_the_middle_is_not_sound(share: float, sound: bool) -> None:
    findings = check_deliveries(SOURCE, HEADS, COMPLETE, [], [KillRecord("worker", 0.5), KillRecord("leader", share)])
    assert findings.is_ok is sound


def test_the_torn_last_line_is_no_delivery(tmp_path: Path) -> None:
    line = json.dumps({"stream_id": 1, "grant_id": 7, "offsets": [0, 1], "rows": [0, 1]})
    (tmp_path / "41.jsonl").write_text(f"{line}\n{line[:-9]}")
    (tmp_path / "42.jsonl").write_text("")
    assert read_delivered_batches(tmp_path) == [DeliveryRecord("41", 1, 7, (0, 1), (0, 1))]


# --- the exit code and what is said ---------------------------------------------------------------------------------


class Processes(dict[str, Any]):
    """The demo's processes, none of which runs."""

    def start(self, name: str, *_: str) -> Any:
        return self["application"]


class Performance:
    """The demo without its processes: at each look a message more is consumed, and at some looks nobody leads."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, attempts: list[DeliveryRecord], leaderless: Sequence[int] = ()
    ) -> None:
        self.killed: list[object] = []
        self.environment: Mapping[str, str] = {}
        self._consumed, self._leaderless = 0, leaderless
        application = SimpleNamespace(poll=lambda: None, communicate=lambda timeout: None)
        node = SimpleNamespace(kill=lambda: self.killed.append("n1"))
        self._processes = Processes(application=application, n1=node)
        publisher = SimpleNamespace(publish_batch=lambda batch: None, flush=lambda: None)
        stubs: dict[str, object] = {
            "TASKS": 2,
            "open_database": lambda *_: contextlib.nullcontext(SimpleNamespace(url=Secret("url"))),
            "ChildProcesses": self._start,
            "DemoGroupMonitor": lambda url: contextlib.nullcontext(SimpleNamespace(read=self._look, read_history=list)),
            "Publisher": lambda url: contextlib.nullcontext(publisher),
            "time": SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic, time=time.time),
            "os": SimpleNamespace(environ=os.environ, kill=lambda process, _: self.killed.append(process)),
        }
        for name, stub in stubs.items():
            monkeypatch.setattr(runner, name, stub)
        published = dict.fromkeys(("topic", "key", "value"), SOURCE["carrier"])
        source = pa.table({**dict(zip(SOURCE.column_names, SOURCE.columns, strict=True)), **published})
        monkeypatch.setattr(flights, "load", lambda: source)
        monkeypatch.setattr(delivery_check, "read_delivered_batches", lambda records: attempts)

    def _start(self, home: Path, environment: Mapping[str, str]) -> contextlib.nullcontext[Processes]:
        self.environment = environment
        return contextlib.nullcontext(self._processes)

    def _look(self) -> SimpleNamespace:
        done = min(self._consumed, 6)
        self._consumed += 1
        streams = [
            SimpleNamespace(stream_id=1, agent=f"h:{WORKER}:x", status="held", position=min(done, 4), head=4),
            SimpleNamespace(stream_id=2, agent="h:42:x", status="held", position=max(done - 4, 0), head=2),
        ]
        for stream in streams:
            stream.lag = stream.head - stream.position
        leader = SimpleNamespace(node="n1")
        return SimpleNamespace(leader=leader, has_leader=done not in self._leaderless, streams=streams)


@pytest.mark.parametrize(
    ("attempts", "leaderless", "code", "reported"),
    [
        (COMPLETE, (3,), 0, "sound: nothing lost, every repeat explained"),
        (COMPLETE[:1], (3,), 1, "NOT SOUND: 2 messages are lost; totals differ for DL, UA"),
        ([*COMPLETE, AGAIN], (3,), 1, "NOT SOUND: 2 repeats are not explained"),
        (COMPLETE, (3, 4), 1, "NOT SOUND: the leader was killed when 83.3% was consumed, not between 30% and 70%"),
    ],
    ids=["sound", "lost", "repeated", "killed late"],
)
def test_the_exit_code_is_1_if_anything_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    attempts: list[DeliveryRecord],
    leaderless: Sequence[int],
    code: int,
    reported: str,
) -> None:
    """Lost, unexplained, or killed at the wrong time; a second kill waits for a leader to kill."""
    play = Performance(monkeypatch, attempts, leaderless)
    assert runner.run_demo(as_json=False, keep=None) == code
    assert reported in capsys.readouterr().out
    assert play.killed == [WORKER, "n1"], "the worker with the most to do, then the leader"
    play = Performance(monkeypatch, attempts, leaderless)
    assert runner.run_demo(as_json=True, keep=None) == code
    answer = json.loads(capsys.readouterr().out)
    shares = {kill["what"]: kill["consumed_share"] for kill in answer["kills"]}
    assert shares == {"worker": 2 / 6, "leader": (max(leaderless) + 1) / 6}
    assert answer.keys() == {name for first_cell in documented() for name in first_cell}
    assert {type(answer[name]) for name in ("published", "lost", "moves", "elapsed_s")} == {int}


def test_the_callers_settings_are_not_the_demos(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are for another database."""
    for name in ("SUBLET_DATABASE_URL_FILE", "SUBLET_SCHEMA", "SUBLET_AUTH"):
        monkeypatch.setenv(name, "the caller's")
    play = Performance(monkeypatch, COMPLETE, (3,))
    assert runner.run_demo(as_json=True, keep=None) == 0
    assert {name for name in play.environment if name.startswith("SUBLET_")} == {"SUBLET_DATABASE_URL"}
    assert "SUBLET_SCHEMA" not in os.environ, "it migrates and publishes itself"


def documented() -> dict[tuple[str, ...], list[str]]:
    """{the names of a row's first cell: those that its description has}, of the demo's table of docs/json.md."""
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    (table,) = re.findall(r"^## sublet demo\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`[^|]*) \|[^|]*\|(.*) \|$", table, re.MULTILINE)
    return {tuple(re.findall(r"`(\w+)`", first)): re.findall(r"`(\w+)`", last) for first, last in rows}


def test_nested_fields_of_the_answer_are_documented() -> None:
    nested = documented()
    (move,) = holding_intervals([replace(KILLED, event="grant", is_forced=False)], began_us=0)
    assert nested["moves", "move_list"] == list(move)
    (repeat,) = found([*COMPLETE, AGAIN], [KILLED]).duplicate_ranges
    assert nested["duplicate_ranges",] == list(repeat)
    assert nested["kills",] == list(asdict(KillRecord("worker", 0.5)))


def test_lines_are_not_broken_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    DemoDisplay().print_line("a sentence of the demo, " * 10)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_holding_is_described_in_text() -> None:
    def record(at_s: float, event: str, reason: str, agent: str | None, position: int, forced: bool) -> HistoryRecord:
        return HistoryRecord(int(at_s * 1e6), 1, 1, event, reason, 7, "b", agent, position, 1, forced)

    lines = holding_intervals(
        [
            record(5, "grant", "allocated", "host:41:x", 0, False),
            record(9, "force_release", "not reclaimed", "host:41:x", 30, True),
            record(9, "grant", "allocated", "host:42:x", 30, False),
            record(12, "release", "rebalance", "host:42:x", 50, False),
            record(12, "grant", "allocated", "host:43:x", 50, False),
            record(14, "release", "allocated", "host:43:x", 70, False),
            record(15, "grant", "allocated", "host:44:x", 70, False),
            record(16, "revoke", "rebalance", "host:44:x", 80, False),
        ],
        began_us=5_000_000,
    )
    reported = [(line["holder"], line["from_s"], line["until_s"], line["to_offset"], line["ended"]) for line in lines]
    assert reported == [
        ("worker 41", 0.0, 4.0, 30, "taken away: not reclaimed"),
        ("worker 42", 4.0, 7.0, 50, "handed over for balance"),
        ("worker 43", 7.0, 9.0, 70, "handed over when it left"),
        ("worker 44", 10.0, None, 70, "holds it still"),
    ]
    assert [line["moved_from"] for line in lines] == [None, "worker 41", "worker 42", "worker 43"]


def test_what_became_of_a_kill_is_shown_once() -> None:
    said: list[str] = []
    story = TakeoverReporter(said.append)
    see: Callable[..., None] = lambda node, **agents: story.update(_seen(node, agents))  # noqa: E731
    see("demo-1", s1="h:41:x", s2="h:42:x")
    story.on_kill("h:41:x", [1])
    see("demo-1", s1="h:41:x", s2="h:42:x")
    see(None, s1=None, s2="h:42:x")
    assert said == []
    see("demo-2", s1="h:42:x", s2="h:42:x")
    see("demo-2", s1="h:42:x", s2="h:42:x")
    assert said == [
        "demo-2 leads the group now; workers that live keep their streams",
        "what worker 41 held is with worker 42 now",
    ]


def _seen(node: str | None, agents: dict[str, str | None]) -> GroupOverview:
    leader = None if node is None else SimpleNamespace(node=node)
    lines = [SimpleNamespace(stream_id=int(name[1:]), agent=agent) for name, agent in agents.items()]
    return cast("GroupOverview", SimpleNamespace(leader=leader, has_leader=node is not None, streams=lines))
