"""Determines from facts of the database why a stream is not being consumed; pure.

`RULES` is the table of reasons, and the first that is true is the answer: what ends a stream comes before what stops
its group, and that before what single streams wait for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from msgspec import Struct

from sublet_storage.groups.status.diagnosis_facts import GroupDiagnosisFacts, StallReason, StreamDiagnosisFacts
from sublet_storage.util.name_list import format_names

QUIET_S = 10.0
"""How long messages wait without a report of their holder before their stream counts as stalled."""

SILENT_MEMBER_S = 20.0
"""How long a stream is not granted after it was taken: a lease and a leader's guarantee, ten seconds each by default.
The times of the nodes are not in the database."""

# What holders report of a block that cannot be read or decoded (`sublet_protocol.domain.errors.PoisonBlock`). A store
# that is away has none, and loses nothing.
_END_OF_BLOCK = re.compile(r"\bends before offset (\d+)\b")
_LOWER_HEAD = re.compile(r"\bis beyond the head (\d+)\b")


class StallDiagnosis(Struct, frozen=True):
    """The stall reason, its description, and a hint if there is one."""

    reason: StallReason
    detail: str
    hint: str | None = None


class DiagnosisRule(Struct, frozen=True):
    """A row of the table `RULES`."""

    reason: StallReason
    matches: Callable[[GroupDiagnosisFacts, StreamDiagnosisFacts], bool]
    detail: Callable[[GroupDiagnosisFacts, StreamDiagnosisFacts], str]
    hint: Callable[[GroupDiagnosisFacts, StreamDiagnosisFacts], str | None] = lambda group, stream: None


def diagnose(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> StallDiagnosis:
    """Return the reason why this stream stands still, or that it does not."""
    rule = next(rule for rule in RULES if rule.matches(group, stream))
    return StallDiagnosis(rule.reason, rule.detail(group, stream), rule.hint(group, stream))


def _quote(group: GroupDiagnosisFacts) -> str:
    return shlex.quote(group.subscription)


def suggest_reset(subscription: str, stream_id: int, blocked_reason: str | None, *, is_atomic: bool) -> str:
    """Return the command that lets a blocked stream go on; an atomic group is reset as a whole."""
    command = f"sublet groups reset {shlex.quote(subscription)}"
    if is_atomic:
        return f"{command} --to-earliest"
    head = _LOWER_HEAD.search(blocked_reason or "")
    return f"{command} --stream {stream_id} {'--to-current' if head is None else f'--to-offset {head[1]}'}"


def _reset(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts, option: str) -> str:
    return f"sublet groups reset {_quote(group)} --stream {stream.stream_id} {option}"


def _reset_group(group: GroupDiagnosisFacts) -> str:
    return f"sublet groups reset {_quote(group)}"


def _describe_block(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    reason = stream.blocked_reason or "no reason is recorded"
    return f"it is blocked: {_describe_dropped_space(stream) if _is_of_dropped_space(stream) else reason}"


def _is_of_dropped_space(stream: StreamDiagnosisFacts) -> bool:
    return stream.dropped_space is not None and stream.is_gone and stream.position < stream.head


def _describe_dropped_space(stream: StreamDiagnosisFacts) -> str:
    """Return the reason for a dropped space, without offsets: it is the same for all streams of that space."""
    return (
        f"messages that the group had not consumed are gone, with the space {stream.dropped_space}, which was "
        "dropped, or by "
        "its retention"
    )


def _suggest_skip_of_space(group: GroupDiagnosisFacts) -> str:
    reset = f"sublet groups reset {_quote(group)}"
    if group.is_atomic:
        return f"Go on without them; what is left of all spaces is given again: {reset} --to-earliest"
    return f"Go on without them, in all blocked streams (in one: with --stream N): {reset} --to-current"


def _unblock(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    if _is_of_dropped_space(stream):
        return _suggest_skip_of_space(group)
    reset_command = suggest_reset(
        group.subscription, stream.stream_id, stream.blocked_reason, is_atomic=group.is_atomic
    )
    if end := _END_OF_BLOCK.search(stream.blocked_reason or ""):
        return f"Put it right, and try once more: {reset_command}. {_suggest_skip(group, stream, end[1])}"
    if group.is_atomic:
        return f"Remove the cause. Then reset the group as a whole: {reset_command}"
    if head := _LOWER_HEAD.search(stream.blocked_reason or ""):
        return (
            f"From offset {head[1]} on may be other messages now. Go on there: {reset_command}, or behind all, "
            "--to-latest."
        )
    if stream.is_gone and stream.position < stream.head:
        return f"Go on without what retention has taken: {_reset(group, stream, '--to-earliest')}"
    return f"Remove the cause. Then try once more: {reset_command}, or leave the message there out, with --shift-by 1."


def _describe_next_loss(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    loss = (
        _describe_dropped_space(stream)
        if _is_of_dropped_space(stream)
        else f"retention has taken its messages from offset {stream.position} on"
    )
    outcome = "finished without them" if group.may_skip_lost_data else "blocked"
    return f"{loss}: with its leader's next look it is {outcome}"


def _suggest_skip_of_loss(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str | None:
    entire = f"sublet groups reset {_quote(group)} --to-earliest"
    if group.may_skip_lost_data:
        return None
    if _is_of_dropped_space(stream):
        return _suggest_skip_of_space(group)
    return f"Go on without them: {entire if group.is_atomic else _reset(group, stream, '--to-earliest')}"


def _describe_pause(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    reason = f": {group.paused}" if group.paused else ", and no reason is recorded"
    still = f"; {stream.owner} has not handed it over yet" if stream.status == "held" else ""
    return f"the group is paused{reason}{still}"


def _describe_missing_node(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    if group.draining:
        return f"nobody leads the group, and all nodes that are there drain: {', '.join(group.draining)}"
    return "nobody leads the group, and no node is there"


def _start_node(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    if group.draining:
        undo = f"sublet nodes drain {shlex.quote(group.draining[0])} --undo"
        return f"Start another node, sublet leader --name ANOTHER, or let one lead again: {undo}"
    return "Start one: sublet leader"


def _describe_epochs(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    front = stream.waits_for
    assert front is not None, "the rule has looked"
    holders = f"producer {', '.join(front.producers)} may still publish there" if front.producers else "nobody holds it"
    return f"the epochs of space {front.space} from {front.least} on are not completed: {holders}"


def _complete(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str | None:
    if stream.waits_for is None or not stream.waits_for.producers:
        return "A node completes it within seconds, if one is there."
    return "The publisher completes them by publisher.advance(...), by ending, or when its lease runs out."


def _describe_stall(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    progress = f"stands at offset {stream.position}, {stream.lag} behind"
    return f"{stream.owner} has it and has reported nothing for {stream.stalled_s:.0f} s: it {progress}"


def _describe_read_failure(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    because = (stream.unreadable_reason or "").rstrip(" .")
    return f"{stream.owner} has it and cannot read on, for {stream.unreadable_s or 0.0:.0f} s now: {because}"


def _make_readable(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    hint = "It is tried again, and goes on when that is put right; sublet doctor checks the payload locations."
    end = _END_OF_BLOCK.search(stream.unreadable_reason or "")
    return hint if end is None else f"{hint} {_suggest_skip(group, stream, end[1])}"


def _suggest_skip(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts, end: str) -> str:
    """Return the hint for a block that ends before that offset."""
    reset_command = (
        f"{_reset_group(group)} --to-epoch EPOCH" if group.is_atomic else _reset(group, stream, f"--to-offset {end}")
    )
    return f"To go past what is lost for good: {reset_command}"


def _describe_reservation(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    if stream.reserved_s is not None and stream.reserved_s > 0:
        return f"something in it is in doubt: it waits for session {stream.owner}, {stream.reserved_s:.0f} s more"
    return (
        f"something in it is in doubt; session {stream.owner} has not come back in time, and the next other member "
        "gets it"
    )


def _release(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    group_reset = f"sublet groups reset {_quote(group)} --to-earliest --force"
    reset_command = group_reset if group.is_atomic else _reset(group, stream, "--to-current --force")
    return f"Start {stream.owner} again. To give it up, and see messages twice: {reset_command}"


def _describe_parents(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    parents = [f"{p.stream_id} ({p.status}, at {p.position} of {p.head})" for p in stream.parents]
    return f"it came from streams that are to be consumed first: {format_names(parents, 3)}"


def _suggest_parent_diagnosis(group: GroupDiagnosisFacts, stream: StreamDiagnosisFacts) -> str:
    return f"See why they are not: sublet groups why {_quote(group)} --stream {stream.parents[0].stream_id}"


RULES = (
    DiagnosisRule(
        StallReason.FINISHED, lambda g, s: s.status == "finished", lambda g, s: "it is closed, and consumed to its end"
    ),
    DiagnosisRule(
        StallReason.BLOCKED,
        lambda g, s: s.status == "blocked",
        _describe_block,
        _unblock,
    ),
    DiagnosisRule(
        StallReason.GONE,
        lambda g, s: s.is_gone and s.position < s.head,
        _describe_next_loss,
        _suggest_skip_of_loss,
    ),
    DiagnosisRule(
        StallReason.PAUSED,
        lambda g, s: g.paused is not None,
        _describe_pause,
        lambda g, s: f"Where it is not meant any more: sublet groups resume {_quote(g)}",
    ),
    DiagnosisRule(
        StallReason.NO_NODE, lambda g, s: g.leader is None and not g.nodes, _describe_missing_node, _start_node
    ),
    DiagnosisRule(
        StallReason.NO_LEADER,
        lambda g, s: g.leader is None and g.held > 0,
        lambda g, s: f"{g.last_leader or 'nobody'} led the group last, and nobody has taken over",
        lambda g, s: "A node does within its lease once a consumer asks. If it stays so: sublet doctor",
    ),
    DiagnosisRule(
        StallReason.NO_MEMBER,
        lambda g, s: g.leader is None,
        lambda g, s: "nobody leads the group, as no consumer has asked for it since somebody last did",
        lambda g, s: f"One that runs asks within seconds, after a reset say. If none does: sublet consume {_quote(g)}",
    ),
    DiagnosisRule(
        StallReason.REVOKED,
        lambda g, s: s.status == "held" and s.revoke_reason is not None,
        lambda g, s: f"it is being taken back from {s.owner}: {s.revoke_reason}",
        lambda g, s: "It moves when what its holder has in hand is done.",
    ),
    DiagnosisRule(StallReason.CAUGHT_UP, lambda g, s: s.lag == 0, lambda g, s: "there is nothing to consume"),
    DiagnosisRule(
        StallReason.UNREADABLE, lambda g, s: s.unreadable_reason is not None, _describe_read_failure, _make_readable
    ),
    DiagnosisRule(StallReason.WAITING_FOR_EPOCHS, lambda g, s: s.waits_for is not None, _describe_epochs, _complete),
    DiagnosisRule(
        StallReason.STALLED,
        lambda g, s: s.status == "held" and s.stalled_s >= QUIET_S,
        _describe_stall,
        lambda g, s: f"Look what {s.owner} is doing; when it is stopped, others get the stream.",
    ),
    DiagnosisRule(StallReason.CONSUMING, lambda g, s: s.status == "held", lambda g, s: f"{s.owner} consumes it"),
    DiagnosisRule(StallReason.RESERVED, lambda g, s: s.status == "reserved", _describe_reservation, _release),
    DiagnosisRule(
        StallReason.WAITING_FOR_PARENTS, lambda g, s: bool(s.parents), _describe_parents, _suggest_parent_diagnosis
    ),
    DiagnosisRule(
        StallReason.RESERVED_FOR_SESSION,
        lambda g, s: s.reserved_s is not None and s.reserved_s > 0,
        lambda g, s: f"session {s.owner} has left, and it is reserved for its return, {s.reserved_s:.0f} s more",
        lambda g, s: f"Start {s.owner} again, or wait: then others get it.",
    ),
    DiagnosisRule(
        StallReason.FORMER_HOLDER,
        lambda g, s: s.taken_s is not None and s.taken_s < SILENT_MEMBER_S,
        lambda g, s: (
            f"it was taken from its holder {s.taken_s or 0.0:.0f} s ago, by a reset or with the group before this one, "
            f"and {g.leader} grants it when that one may begin no more calls: 20 s after, by default"
        ),
    ),
    DiagnosisRule(
        StallReason.MEMBERS_SILENT,
        lambda g, s: not g.held,
        lambda g, s: f"{g.leader} leads the group, and no consumer has a stream of it",
        lambda g, s: f"Start a consumer. Where one is there, see whether it joins: sublet groups watch {_quote(g)}",
    ),
    DiagnosisRule(
        StallReason.GRANT_PENDING,
        lambda g, s: True,
        lambda g, s: f"it is free, and {g.leader} grants it next",
        lambda g, s: f"If it stays so, see what its leader does: sublet groups watch {_quote(g)}",
    ),
)
"""The rules in the order in which they are tried."""
