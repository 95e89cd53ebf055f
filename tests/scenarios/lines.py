"""What a scenario says in a line: messages and notifications of sessions as text, and text as messages.

Terms and grant ids are large numbers that only grow; a scenario counts them instead: the first term that is ever seen
is `term 1`, the first grant of a stream is that stream's `grant 1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import assert_never

from sublet_borrower.machine.agent import SessionAssignmentUpdate, SubscriptionClosed
from sublet_borrower.machine.events import (
    GroupFrontiersAdvanced,
    RevokeStarted,
    SavedProgress,
    StreamGranted,
    StreamRemoved,
)
from sublet_protocol.messages.borrower_leader import (
    Disconnect,
    Grant,
    GrantEndOutcome,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    ToLeader,
    UpdateProgress,
)

Message = ToLeader | ToBorrower
PINGS = ("ping ", "ping_response ")

_HEAD = re.compile(r"(?P<name>[a-z_]+) (?P<borrower>\S+)(?: term (?P<term>\d+))?(?P<rest>.*)")
_STREAM = re.compile(r" stream (\d+) grant (\d+)(?: at (\d+))?( final)?,?")


class BadLine(Exception):
    """A line of a scenario that says nothing the stage understands."""


class Lines:
    """Knows which number stands for which term and grant id. One per scenario."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}

    # --- to text ----------------------------------------------------------------------------------------------------

    def message(self, message: Message) -> str:
        """Its protocol name, the borrower, the term, and what else it bears."""
        name = re.sub(r"(?<=.)([A-Z])", r"_\1", type(message).__name__).lower()
        if isinstance(message, Ping):
            return " ".join((name, *message.borrower_ids))
        term = "" if isinstance(message, LeaderWanted) else f" term {self._count('term', message.term)}"
        return f"{name} {message.borrower_id}{term}{self._rest(message)}"

    def _rest(self, message: Message) -> str:
        match message:
            case LeaderWanted():
                return self._wanted(message)
            case LeaderConnectResponse():
                return f", go to {message.address}" if message.address else ""
            case UpdateProgress() | Disconnect():
                return self._list(message.streams)
            case Grant():
                end = "" if message.end_offset is None else f" to {message.end_offset}"
                return f" {self.grant(message.stream_id, message.grant_id)} from {message.position}{end}"
            case Revoke() | RevokeFinished():
                return f" {self.grant(message.stream_id, message.grant_id)}"
            case Revoked():
                return f" {self.grant(message.stream_id, message.grant_id)} {message.reason}"
            case ProgressSaved():
                return f" {self.grant(message.stream_id, message.grant_id)} at {message.position}"
            case Invalidate():
                return f" {message.reason}"
            case Ping() | PingResponse():
                return ""
            case _:
                assert_never(message)

    def _wanted(self, wanted: LeaderWanted) -> str:
        group = "" if wanted.group_id is None else f" group {wanted.group_id}"
        after = f" after {wanted.predecessor}" if wanted.predecessor else ""
        keeping = f" keeping{self._list(wanted.reclaim)}" if wanted.reclaim else ""
        return f"{group}{after}{' leaving' if wanted.leaving else ''}{keeping}"

    def _list(self, streams: Iterable[StreamProgress | HeldGrant]) -> str:
        return ",".join(
            f" {self.grant(s.stream_id, s.grant_id)} at {s.position}"
            + (" final" if isinstance(s, StreamProgress) and s.final else "")
            for s in streams
        )

    def reported(self, reported: SessionAssignmentUpdate | SubscriptionClosed) -> str:
        """What an agent reports to the session of one of its subscriptions."""
        if isinstance(reported, SubscriptionClosed):
            return f"subscription {reported.handle}: closed {reported.reason}"
        match reported.update:
            case StreamGranted(grant):
                text = f"install {self.grant(grant.stream_id, grant.grant_id)} from {grant.position}"
            case RevokeStarted(stream_id, grant_id):
                text = f"stop {self.grant(stream_id, grant_id)}"
            case StreamRemoved(stream_id, grant_id, reason):
                text = f"remove {self.grant(stream_id, grant_id)} {reason}"
            case SavedProgress(stream_id, grant_id, position):
                text = f"saved {self.grant(stream_id, grant_id)} at {position}"
            case GroupFrontiersAdvanced(epochs):
                text = f"announced {epochs}"
            case _:
                assert_never(reported.update)
        return f"subscription {reported.handle}: {text}"

    def grant(self, stream_id: int, grant_id: int) -> str:
        """A stream under a grant."""
        return f"stream {stream_id} grant {self._count(f'grant of stream {stream_id}', grant_id)}"

    def _count(self, kind: str, value: int) -> int:
        if value == 0:
            return 0
        seen = self._seen.setdefault(kind, [])
        if value not in seen:
            seen.append(value)
        return seen.index(value) + 1

    # --- from text --------------------------------------------------------------------------------------------------

    def parse(self, text: str) -> Message:
        """The message that `message` would write so. Raises `BadLine`; not all kinds can be said by hand."""
        head = _HEAD.fullmatch(text)
        if head is None:
            raise BadLine(f"{text!r} is no message: `NAME BORROWER term N ...` is expected")
        borrower, term = head["borrower"], self._value("term", int(head["term"] or 0))
        if head["name"] == "ping":
            return Ping((borrower, *head["rest"].split()), 0.0)
        make = _MADE_OF_STREAMS.get(head["name"])
        if make is None or _STREAM.sub("", head["rest"]).strip() not in ("", *GrantEndOutcome):
            raise BadLine(f"{text!r} cannot be said by hand: only ping, {', '.join(_MADE_OF_STREAMS)}")
        streams = tuple(
            StreamProgress(int(s), self._value(f"grant of stream {s}", int(grant)), int(position or 0), bool(final))
            for s, grant, position, final in _STREAM.findall(head["rest"])
        )
        reason = next((r for r in GrantEndOutcome if head["rest"].endswith(f" {r}")), GrantEndOutcome.LOST)
        if not streams and head["name"] != "disconnect":
            raise BadLine(f"{text!r} names no stream")
        return make(borrower, term, streams, reason)

    def _value(self, kind: str, count: int) -> int:
        if count == 0:
            return 0
        seen = self._seen.get(kind, [])
        if count > len(seen):
            raise BadLine(f"{kind} {count} has not been seen yet: {len(seen)} are known")
        return seen[count - 1]


_Make = Callable[[str, int, tuple[StreamProgress, ...], GrantEndOutcome], Message]
_MADE_OF_STREAMS: dict[str, _Make] = {
    "update_progress": lambda borrower, term, streams, _: UpdateProgress(borrower, term, streams),
    "disconnect": lambda borrower, term, streams, _: Disconnect(borrower, term, streams),
    "revoke_finished": lambda b, term, s, _: RevokeFinished(b, term, s[0].stream_id, s[0].grant_id),
    "revoke": lambda b, term, s, _: Revoke(b, term, s[0].stream_id, s[0].grant_id),
    "revoked": lambda b, term, s, reason: Revoked(b, term, s[0].stream_id, s[0].grant_id, reason),
}
