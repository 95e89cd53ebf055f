"""Tests of the checks on handmade histories, sound ones and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sublet_storage.groups.model.records import HistoryRecord
from tests.recorded.anomaly_report import report_lines
from tests.recorded.checks import Kind, check
from tests.recorded.history import Call, Effect, Group, History, Message, Outcome

LOOPS, EXACT = Group("$share/loops/#"), Group("$share/exact/#", exact=True)
LANE = "key"
SECOND = 1_000_000
PARENT, CHILD = 1, 2


def message(number: int, **facts: object) -> Message:
    made = Message(f"p:{number}", "p", number, "a/1", LANE, float(number), Outcome.OK, number + 0.5)
    return replace(made, **facts)  # type: ignore[arg-type]


def call(group: Group, stream: int, grant: int, offset: int, found: str, at: float, **facts: object) -> Call:
    name = f"{group.name}/{stream}/{grant}/{offset}/{at}"
    session = f"s{grant}"
    made = Call(name, group.name, "worker", session, stream, grant, ((offset, found),), at, at, Outcome.OK, at + 0.1)
    return replace(made, **facts)  # type: ignore[arg-type]


def line(stream: int, event: str, grant: int, position: int, at: float, **facts: object) -> HistoryRecord:
    made = HistoryRecord(int(at * SECOND), 1, stream, event, "", grant, "b", "agent", position, 1, is_forced=False)
    return replace(made, **facts)  # type: ignore[arg-type]


def effect(number: int, made_by: Call) -> Effect:
    ((offset, found),) = made_by.messages
    return Effect(number, EXACT.name, made_by.id, made_by.stream, offset, found, LANE, number - 1 or None)


def sound() -> History:
    """Return four messages, two in a stream and two in its child. Of the loops the holder of the parent dies in the
    second call; of the transactions each is done once."""
    log = [(PARENT, 0, "p:1"), (PARENT, 1, "p:2"), (CHILD, 0, "p:3"), (CHILD, 1, "p:4")]
    loops = [
        call(LOOPS, PARENT, 10, 0, "p:1", 20),
        call(LOOPS, PARENT, 10, 1, "p:2", 21, outcome=Outcome.UNKNOWN, ended=None),
        call(LOOPS, PARENT, 11, 1, "p:2", 30),
        call(LOOPS, CHILD, 12, 0, "p:3", 40),
        call(LOOPS, CHILD, 12, 1, "p:4", 41),
    ]
    granted = [
        line(PARENT, "grant", 10, 0, 19),
        line(PARENT, "force_release", 10, 1, 28, is_forced=True, redelivery_end=2),
        line(PARENT, "grant", 11, 1, 29),
        line(CHILD, "grant", 12, 0, 39),
    ]
    exact = [call(EXACT, stream, stream, offset, found, 50.0 + n) for n, (stream, offset, found) in enumerate(log)]
    return History(
        {f"p:{number}": message(number) for number in range(1, 5)},
        log,
        [*loops, *exact],
        [effect(number, each) for number, each in enumerate(exact, 1)],
        [LOOPS, EXACT],
        {LOOPS.name: granted, EXACT.name: [line(PARENT, "grant", 1, 0, 49), line(CHILD, "grant", 2, 0, 49)]},
    )


@pytest.mark.conforms("W1", "E29", "E25")
def test_a_sound_history_has_no_anomaly() -> None:
    assert check(sound()) == []


def _calls(history: History, group: Group) -> list[int]:
    return [index for index, each in enumerate(history.calls) if each.group == group.name]


def _change(history: History, group: Group, number: int, **facts: object) -> None:
    index = _calls(history, group)[number]
    history.calls[index] = replace(history.calls[index], **facts)  # type: ignore[arg-type]


def _stored_in_part(history: History) -> None:
    history.messages["p:4"] = message(4, together=4)
    history.messages["p:5"] = message(5, together=4, outcome=Outcome.UNKNOWN)


def _given_again_after_a_commit(history: History) -> None:
    history.lendings[EXACT.name].append(line(CHILD, "force_release", 2, 0, 60, is_forced=True, redelivery_end=2))
    history.lendings[EXACT.name].append(line(CHILD, "grant", 3, 0, 61))
    history.calls.append(call(EXACT, CHILD, 3, 1, "p:4", 62, outcome=Outcome.FAILED))


def _effects_out_of_order(history: History) -> None:
    first, second = history.effects[:2]
    history.effects[:2] = replace(second, number=1, before=None), replace(first, number=2, before=1)


def _back(history: History, **facts: object) -> None:
    """Add a record of the child's lendings with an earlier offset, grant or term."""
    history.lendings[LOOPS.name].append(line(CHILD, "release", 12, 2, 50))
    history.lendings[LOOPS.name].append(replace(line(CHILD, "grant", 13, 2, 51), **facts))  # type: ignore[arg-type]


def _reset(history: History) -> None:
    """Add a reset to offset 1 of the parent and 0 of the child, which are consumed again."""
    at = {"reason": "reset to the earliest; was at 2"}
    history.lendings[LOOPS.name] += [
        line(PARENT, "reset", 11, 1, 60, **at),
        line(CHILD, "reset", 12, 0, 60, **at),
        line(PARENT, "grant", 21, 1, 61),
        line(CHILD, "grant", 22, 0, 63),
    ]
    history.calls += [
        call(LOOPS, PARENT, 21, 1, "p:2", 62),
        call(LOOPS, CHILD, 22, 0, "p:3", 64),
        call(LOOPS, CHILD, 22, 1, "p:4", 65),
    ]


def _from_before_a_reset(history: History) -> None:
    _reset(history)
    history.calls.append(call(LOOPS, PARENT, 21, 0, "p:1", 61.5))


def _not_given_again_after_a_reset(history: History) -> None:
    _reset(history)
    del history.calls[-1]


def _out_of_order_after_a_reset(history: History) -> None:
    _reset(history)
    _change(history, LOOPS, -3, begun=66.0, ended=66.1)


Breaking = Callable[[History], object]
BROKEN: dict[str, tuple[Breaking, set[Kind]]] = {
    "acknowledged and not stored": (lambda h: h.messages.update({"p:5": message(5)}), {Kind.LOST}),
    "acknowledged elsewhere": (lambda h: h.messages.update({"p:1": message(1, place=(CHILD, 0))}), {Kind.PHANTOM}),
    "stored twice": (lambda h: h.log.append((CHILD, 2, "p:4")), {Kind.TWICE, Kind.LOST, Kind.MISSING}),
    "published by nobody": (lambda h: h.messages.pop("p:4"), {Kind.PHANTOM}),
    "rolled back": (lambda h: h.messages.update({"p:4": message(4, outcome=Outcome.FAILED)}), {Kind.RESURRECTED}),
    "stored in part": (_stored_in_part, {Kind.TORN}),
    "an offset missing": (lambda h: h.log.remove((CHILD, 0, "p:3")), {Kind.LOST, Kind.PHANTOM}),
    "never given": (lambda h: h.calls.pop(_calls(h, LOOPS)[-1]), {Kind.LOST}),
    "failed and never again": (lambda h: _change(h, LOOPS, -1, outcome=Outcome.FAILED), {Kind.LOST}),
    "child before parent": (lambda h: _change(h, LOOPS, -2, begun=20.5, ended=20.6), {Kind.ORDER}),
    "child while parent is worked on": (lambda h: _change(h, LOOPS, 2, ended=40.5), {Kind.EARLY}),
    "repeated before the window": (lambda h: h.calls.append(call(LOOPS, PARENT, 11, 0, "p:1", 29.5)), {Kind.REPEATED}),
    "repeated under one grant": (lambda h: h.calls.append(call(LOOPS, CHILD, 12, 0, "p:3", 42)), {Kind.REPEATED}),
    "called after it was granted away": (lambda h: _change(h, LOOPS, 1, begun=30.5, wall=30.5), {Kind.LATE}),
    "two sessions under one grant": (lambda h: _change(h, LOOPS, -1, session="another"), {Kind.CROSSED}),
    "under a grant of nobody": (lambda h: _change(h, LOOPS, -1, grant=99, session="another"), {Kind.PHANTOM}),
    "another message than is stored": (lambda h: _change(h, LOOPS, -1, messages=((1, "p:3"),)), {Kind.PHANTOM}),
    "given again after a commit": (_given_again_after_a_commit, {Kind.REPEATED}),
    "position goes back": (lambda h: _back(h, position=1), {Kind.BACK}),
    "grant id goes back": (lambda h: _back(h, grant_id=11), {Kind.BACK}),
    "term goes back": (lambda h: _back(h, term=0), {Kind.BACK}),
    "twice in effect": (lambda h: h.effects.append(replace(h.effects[-1], number=5, before=4)), {Kind.DOUBLE}),
    "without effect": (lambda h: h.effects.pop(), {Kind.MISSING}),
    "effect of a refused call": (lambda h: _change(h, EXACT, -1, outcome=Outcome.FAILED), {Kind.RESURRECTED}),
    "effects out of order": (_effects_out_of_order, {Kind.ORDER}),
    "effects beside each other": (lambda h: h.effects.append(replace(h.effects.pop(), before=2)), {Kind.FORKED}),
    "from before the group": (lambda h: h.groups.append(replace(h.groups.pop(0), since=(2.0, 2.1))), {Kind.BEFORE}),
    "from before a reset": (_from_before_a_reset, {Kind.BEFORE}),
    "not given again after a reset": (_not_given_again_after_a_reset, {Kind.LOST}),
    "out of order after a reset": (_out_of_order_after_a_reset, {Kind.ORDER}),
}


@pytest.mark.conforms("W1", "W2", "W3", "W7", "E10", "E25", "E29", "E33", "E34", "E37")
@pytest.mark.parametrize(("breaking", "kinds"), BROKEN.values(), ids=BROKEN)
def test_a_broken_promise_is_named_and_explained(breaking: Breaking, kinds: set[Kind]) -> None:
    history = sound()
    breaking(history)
    found = check(history)
    assert {anomaly.kind for anomaly in found} == kinds, [str(each) for each in found]
    assert all(report_lines(history, anomaly) for anomaly in found if anomaly.messages or anomaly.calls)


def _frozen_before_it_looked_at_the_clock(history: History) -> None:
    history.frozen["worker"] = [(28.0, 30.0)]
    _change(history, LOOPS, 1, wall=30.5)


def _failed_and_done_again(history: History) -> None:
    _change(history, LOOPS, 1, outcome=Outcome.FAILED, ended=21.5)


@pytest.mark.parametrize("what", [_reset, _frozen_before_it_looked_at_the_clock, _failed_and_done_again])
def test_what_the_promises_leave_open_is_no_anomaly(what: Breaking) -> None:
    history = sound()
    what(history)
    assert check(history) == []
