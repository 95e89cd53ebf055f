"""The checker on histories made by hand: a sound one has no anomaly, and each kind of broken promise is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sublet_storage.groups.model.records import HistoryRecord
from tests.recorded.checks import Kind, check
from tests.recorded.checks.story import story
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
    """Four messages, two in a stream and two in its child. Of the loops the holder of the parent dies in the second
    call; of the transactions each is done once."""
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


def _acknowledged_and_not_stored(history: History) -> None:
    history.messages["p:5"] = message(5)


def _acknowledged_elsewhere(history: History) -> None:
    history.messages["p:1"] = message(1, place=(CHILD, 0))


def _stored_twice(history: History) -> None:
    history.log.append((CHILD, 2, "p:4"))


def _published_by_nobody(history: History) -> None:
    del history.messages["p:4"]


def _rolled_back(history: History) -> None:
    history.messages["p:4"] = message(4, outcome=Outcome.FAILED)


def _stored_in_part(history: History) -> None:
    history.messages["p:4"] = message(4, together=4)
    history.messages["p:5"] = message(5, together=4, outcome=Outcome.UNKNOWN)


def _an_offset_missing(history: History) -> None:
    history.log.remove((CHILD, 0, "p:3"))


def _never_given(history: History) -> None:
    del history.calls[_calls(history, LOOPS)[-1]]


def _failed_and_never_again(history: History) -> None:
    _change(history, LOOPS, -1, outcome=Outcome.FAILED)


def _child_before_parent(history: History) -> None:
    _change(history, LOOPS, -2, begun=20.5, ended=20.6)


def _child_while_parent_is_worked_on(history: History) -> None:
    _change(history, LOOPS, 2, ended=40.5)


def _repeated_before_the_window(history: History) -> None:
    history.calls.append(call(LOOPS, PARENT, 11, 0, "p:1", 29.5))


def _repeated_under_one_grant(history: History) -> None:
    history.calls.append(call(LOOPS, CHILD, 12, 0, "p:3", 42))


def _called_after_it_was_granted_away(history: History) -> None:
    _change(history, LOOPS, 1, begun=30.5, wall=30.5)


def _two_sessions_under_one_grant(history: History) -> None:
    _change(history, LOOPS, -1, session="another")


def _under_a_grant_of_nobody(history: History) -> None:
    _change(history, LOOPS, -1, grant=99, session="another")


def _another_message_than_is_stored(history: History) -> None:
    _change(history, LOOPS, -1, messages=((1, "p:3"),))


def _after_a_committed_one(history: History) -> None:
    history.lendings[EXACT.name].append(line(CHILD, "force_release", 2, 0, 60, is_forced=True, redelivery_end=2))
    history.lendings[EXACT.name].append(line(CHILD, "grant", 3, 0, 61))
    history.calls.append(call(EXACT, CHILD, 3, 1, "p:4", 62, outcome=Outcome.FAILED))


def _twice_in_effect(history: History) -> None:
    history.effects.append(replace(history.effects[-1], number=5, before=4))


def _without_effect(history: History) -> None:
    del history.effects[-1]


def _effect_of_a_refused_call(history: History) -> None:
    _change(history, EXACT, -1, outcome=Outcome.FAILED)


def _effects_out_of_order(history: History) -> None:
    first, second = history.effects[:2]
    history.effects[:2] = replace(second, number=1, before=None), replace(first, number=2, before=1)


def _effects_beside_each_other(history: History) -> None:
    history.effects[-1] = replace(history.effects[-1], before=2)


def _from_before_the_group(history: History) -> None:
    history.groups[0] = replace(LOOPS, since=(2.0, 2.1))


def _back(**facts: object) -> Callable[[History], None]:
    """The next line of the child's lendings is of an earlier place, grant or term."""

    def breaking(history: History) -> None:
        history.lendings[LOOPS.name].append(line(CHILD, "release", 12, 2, 50))
        history.lendings[LOOPS.name].append(replace(line(CHILD, "grant", 13, 2, 51), **facts))  # type: ignore[arg-type]

    return breaking


def _reset(history: History) -> None:
    """To offset 1 of the parent and 0 of the child, which are worked on again."""
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


BROKEN: list[tuple[Callable[[History], None], set[Kind]]] = [
    (_acknowledged_and_not_stored, {Kind.LOST}),
    (_acknowledged_elsewhere, {Kind.PHANTOM}),
    (_stored_twice, {Kind.TWICE, Kind.LOST, Kind.MISSING}),
    (_published_by_nobody, {Kind.PHANTOM}),
    (_rolled_back, {Kind.RESURRECTED}),
    (_stored_in_part, {Kind.TORN}),
    (_an_offset_missing, {Kind.LOST, Kind.PHANTOM}),
    (_never_given, {Kind.LOST}),
    (_failed_and_never_again, {Kind.LOST}),
    (_child_before_parent, {Kind.ORDER}),
    (_child_while_parent_is_worked_on, {Kind.EARLY}),
    (_repeated_before_the_window, {Kind.REPEATED}),
    (_repeated_under_one_grant, {Kind.REPEATED}),
    (_called_after_it_was_granted_away, {Kind.LATE}),
    (_two_sessions_under_one_grant, {Kind.CROSSED}),
    (_under_a_grant_of_nobody, {Kind.PHANTOM}),
    (_another_message_than_is_stored, {Kind.PHANTOM}),
    (_after_a_committed_one, {Kind.REPEATED}),
    (_back(position=1), {Kind.BACK}),
    (_back(grant_id=11), {Kind.BACK}),
    (_back(term=0), {Kind.BACK}),
    (_twice_in_effect, {Kind.DOUBLE}),
    (_without_effect, {Kind.MISSING}),
    (_effect_of_a_refused_call, {Kind.RESURRECTED}),
    (_effects_out_of_order, {Kind.ORDER}),
    (_effects_beside_each_other, {Kind.FORKED}),
    (_from_before_the_group, {Kind.BEFORE}),
    (_from_before_a_reset, {Kind.BEFORE}),
    (_not_given_again_after_a_reset, {Kind.LOST}),
    (_out_of_order_after_a_reset, {Kind.ORDER}),
]


@pytest.mark.conforms("W1", "W2", "W3", "W7", "E10", "E25", "E29", "E33", "E34", "E37")
@pytest.mark.parametrize(("breaking", "kinds"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_named_and_told(breaking: Callable[[History], None], kinds: set[Kind]) -> None:
    history = sound()
    breaking(history)
    found = check(history)
    assert {anomaly.kind for anomaly in found} == kinds, [str(each) for each in found]
    assert all(story(history, anomaly) for anomaly in found if anomaly.messages or anomaly.calls)


def _frozen_before_it_looked_at_the_clock(history: History) -> None:
    history.frozen["worker"] = [(28.0, 30.0)]
    _change(history, LOOPS, 1, wall=30.5)


def _failed_and_done_again(history: History) -> None:
    _change(history, LOOPS, 1, outcome=Outcome.FAILED, ended=21.5)


@pytest.mark.parametrize("what", [_reset, _frozen_before_it_looked_at_the_clock, _failed_and_done_again])
def test_what_the_promises_leave_open_is_no_anomaly(what: Callable[[History], None]) -> None:
    history = sound()
    what(history)
    assert check(history) == []
