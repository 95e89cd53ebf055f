"""The demo's checker finds what is planted, and the demo says in words what it saw."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from sublet.demo import delivery_check, flights, runner
from sublet.demo.delivery_check import CheckResult, DeliveredBatch, Kill, check_deliveries, read_delivered_batches
from sublet.demo.display import Display
from sublet.demo.holding_intervals import holding_intervals
from sublet.demo.takeover_report import TakeoverReporter
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.groups.status.overview_model import GroupOverview

SOURCE = pa.table({"carrier": ["AA", "AA", "UA", "UA", "UA", "DL"], "distance": [10, 20, 30, 40, 50, 60]})
HEADS = {1: 4, 2: 2}
COMPLETE = [DeliveredBatch("a", 1, 7, (0, 1, 2, 3), (0, 1, 2, 3)), DeliveredBatch("b", 2, 8, (0, 1), (4, 5))]
KILLED = HistoryRecord(0, 1, 1, "force_release", "not reclaimed", 7, "b1", "host:41:x", 2, 1, True)
AGAIN = DeliveredBatch("b", 1, 9, (2, 3), (2, 3))


def found(attempts: list[DeliveredBatch], history: list[HistoryRecord] | None = None) -> CheckResult:
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
    assert repeat == {"stream": 1, "grant_id": 7, "from": 2, "to": 4, "messages": 2, "explained": True}


@pytest.mark.parametrize(
    ("attempts", "history", "wrong"),
    [
        ([COMPLETE[0]], [], {"lost": 2}),
        ([replace(COMPLETE[0], offsets=(0, 1, 2), rows=(0, 1, 2)), COMPLETE[1]], [], {"lost": 1}),
        ([replace(COMPLETE[0], rows=(0, 1, 2, 2)), COMPLETE[1]], [], {"lost": 1, "misplaced": 1}),
        ([replace(COMPLETE[0], rows=(0, 1, 3, 2)), COMPLETE[1], AGAIN], [KILLED], {"misplaced": 4}),
        ([*COMPLETE, DeliveredBatch("b", 2, 8, (2,), (5,))], [], {"misplaced": 2}),
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
    attempts: list[DeliveredBatch], history: list[HistoryRecord], wrong: dict[str, int]
) -> None:
    findings = found(attempts, history)
    assert not findings.is_ok
    assert {name: getattr(findings, name) for name in wrong} == wrong


def test_totals_that_differ_from_the_file_are_not_sound() -> None:
    findings = found(COMPLETE)
    findings.totals["UA"] = (3, 2, 80)
    assert not findings.is_ok


@pytest.mark.parametrize(("share", "sound"), [(0.29, False), (0.3, True), (0.7, True), (0.71, False)])
def test_a_kill_outside_of_the_middle_of_the_work_is_not_sound(share: float, sound: bool) -> None:
    findings = check_deliveries(SOURCE, HEADS, COMPLETE, [], [Kill("worker", 0.5), Kill("leader", share)])
    assert findings.is_ok is sound


def test_the_torn_last_line_of_a_killed_worker_is_no_delivery(tmp_path: Path) -> None:
    line = json.dumps({"stream": 1, "grant_id": 7, "offsets": [0, 1], "rows": [0, 1]})
    (tmp_path / "41.jsonl").write_text(f"{line}\n{line[:-9]}")
    (tmp_path / "42.jsonl").write_text("")
    assert read_delivered_batches(tmp_path) == [DeliveredBatch("41", 1, 7, (0, 1), (0, 1))]


# --- the exit code and what is said ---------------------------------------------------------------------------------


def played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: list[DeliveredBatch], as_json: bool, kill_at: float = 0.5
) -> tuple[int, str]:
    """The demo with its processes left out: what its end makes of these deliveries."""
    nothing = SimpleNamespace(streams=[SimpleNamespace(stream_id=s, head=h) for s, h in HEADS.items()])
    sight = SimpleNamespace(read=lambda: nothing, history=list)
    said = io.StringIO()
    processes = SimpleNamespace(start=lambda *_: SimpleNamespace(communicate=lambda timeout: None))
    monkeypatch.setattr(runner, "GroupView", lambda url: contextlib.nullcontext(sight))
    monkeypatch.setattr(flights, "load", lambda: SOURCE)
    monkeypatch.setattr(delivery_check, "read_delivered_batches", lambda records: attempts)
    for name in ("_until", "_publish", "_watch"):
        monkeypatch.setattr(runner._Stage, name, lambda *_: None)
    with contextlib.redirect_stdout(said):
        kills = [Kill("worker", 0.4), Kill("leader", kill_at)]
        show, story = Display(), TakeoverReporter(lambda text: None)
        play = runner._Stage("url", tmp_path, show, cast("Any", processes), story, kills=kills).play
        return play(as_json), said.getvalue()


@pytest.mark.parametrize(
    ("attempts", "kill_at", "code", "reported"),
    [
        (COMPLETE, 0.5, 0, "sound: nothing lost, every repeat explained"),
        (COMPLETE[:1], 0.5, 1, "NOT SOUND: 2 messages are lost; totals differ for DL, UA"),
        ([*COMPLETE, AGAIN], 0.5, 1, "NOT SOUND: 2 repeats are not explained"),
        (COMPLETE, 0.97, 1, "NOT SOUND: the leader was killed when 97.0% was consumed, not between 30% and 70%"),
    ],
)
def test_the_exit_code_is_1_if_anything_is_lost_or_unexplained_or_was_killed_at_the_wrong_time(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    attempts: list[DeliveredBatch],
    kill_at: float,
    code: int,
    reported: str,
) -> None:
    ended, said = played(monkeypatch, tmp_path, attempts, as_json=False, kill_at=kill_at)
    assert ended == code
    assert reported in said
    (tmp_path / "records").rmdir()
    ended, said = played(monkeypatch, tmp_path, attempts, as_json=True, kill_at=kill_at)
    answer = json.loads(said)
    assert answer["kills"] == [{"what": "worker", "consumed_share": 0.4}, {"what": "leader", "consumed_share": kill_at}]
    assert ended == code
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    (table,) = re.findall(r"^## sublet demo\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert answer.keys() == {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {type(answer[name]) for name in ("published", "lost", "moves", "seconds")} == {int}


def test_a_worker_and_the_leader_are_killed_in_the_middle_of_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The looks at 50 and 52 % show no leader: the second kill has to wait for one."""
    looks = iter([_half_done(percent, led=percent not in (50, 52)) for percent in range(0, 101, 2)])
    sight = SimpleNamespace(read=lambda: next(looks))
    killed: list[str] = []
    node = SimpleNamespace(kill=lambda: killed.append("n1"))
    acting = runner._Stage("url", tmp_path, Display(), cast("Any", {"n1": node}), TakeoverReporter(lambda text: None))
    monkeypatch.setattr(runner._Stage, "_until", lambda _, fact, what: any(fact() for _ in range(51)))
    with subprocess.Popen(["sleep", "60"]) as worker:
        monkeypatch.setattr(runner, "process_of", lambda agent: worker.pid if agent == "h:1:x" else None)
        acting._watch(cast("Any", sight), 100)
        assert worker.wait(10) == -9
    assert killed == ["n1"]
    assert acting.kills == [Kill("worker", 0.34), Kill("leader", 0.54)]
    assert all(kill.is_mid_run for kill in acting.kills)


def _half_done(percent: int, led: bool) -> SimpleNamespace:
    """Two workers with a stream each, of which the second is a little further."""
    lines = [
        SimpleNamespace(stream_id=1, agent="h:1:x", status="held", position=percent // 2 - 2, lag=52 - percent // 2),
        SimpleNamespace(stream_id=2, agent="h:2:x", status="held", position=percent // 2 + 2, lag=48 - percent // 2),
    ]
    return SimpleNamespace(leader=SimpleNamespace(node="n1"), has_leader=led, streams=lines)


def test_lines_are_not_broken_where_nobody_looks_at_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Display().print_line("a sentence of the demo, " * 10)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_holding_is_told_in_words() -> None:
    def record(at_s: float, event: str, reason: str, agent: str | None, position: int, forced: bool) -> HistoryRecord:
        return HistoryRecord(int(at_s * 1e6), 1, 1, event, reason, 7, "b", agent, position, 1, forced)

    lines = holding_intervals(
        [
            record(5, "grant", "allocated", "host:41:x", 0, False),
            record(9, "force_release", "not reclaimed", "host:41:x", 30, True),
            record(9, "grant", "allocated", "host:42:x", 30, False),
            record(12, "release", "balance", "host:42:x", 50, False),
            record(12, "grant", "allocated", "host:43:x", 50, False),
            record(14, "release", "allocated", "host:43:x", 70, False),
            record(15, "grant", "allocated", "host:44:x", 70, False),
            record(16, "revoke", "balance", "host:44:x", 80, False),
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


def test_what_became_of_a_kill_is_told_once() -> None:
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
