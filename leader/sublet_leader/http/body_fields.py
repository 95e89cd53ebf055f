"""Reads the fields of a body: each is there in its kind, or an error names it. What is not known is refused."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin.reset_targets import LARGEST, Target

Told = dict[str, Any]

_TARGETS = "earliest, latest, current, or one of offset, time, shift, epoch and offsets with its value"


def only(told: Told, *names: str) -> None:
    """Raise `UsageError` for a field of another name: a mistyped one must not be passed over."""
    if unknown := set(told) - set(names):
        raise UsageError(f"the body has {min(unknown)!r:.60}: it takes {', '.join(names)}.")


def subscription(told: Told) -> Subscription:
    """The group it is about. Raises `UsageError`."""
    return Subscription.parse(text(told, "subscription"))


def text(told: Told, name: str, default: str | None = None) -> str:
    """Raises `UsageError`."""
    found = told.get(name, default)
    if not isinstance(found, str):
        raise UsageError(f"the body must have {name!r}, a text.")
    return found


def truth(told: Told, name: str, default: bool = False) -> bool:
    """Raises `UsageError`."""
    found = told.get(name, default)
    if not isinstance(found, bool):
        raise UsageError(f"{name!r} is {found!r:.60}: it must be true or false.")
    return found


def number(told: Told, name: str, default: float | None = None) -> float:
    """Raises `UsageError`."""
    found = told.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise UsageError(f"{name!r} is {found!r:.60}: it must be a number.")
    try:
        return float(found)
    except OverflowError:
        raise UsageError(f"{name!r} is a number of more than 300 digits: give a smaller one.") from None


def streams(told: Told) -> Collection[int]:
    """The streams that are named, none for all. Raises `UsageError`."""
    found = told.get("streams", [])
    if not isinstance(found, list) or not all(_is_whole(each) and 0 < each <= LARGEST for each in found):
        raise UsageError(f"'streams' must be a list of ids of streams, whole numbers from 1 to {LARGEST}.")
    return frozenset(found)


def target(told: Told) -> Target:
    """Where to go on from, `to`: a word, or an object of one field. Raises `UsageError`."""
    match told.get("to"):
        case "earliest":
            return Target.earliest()
        case "latest":
            return Target.latest()
        case "current":
            return Target.current()
        case {"offset": int(offset), **rest} if not rest and _is_whole(offset):
            return Target.offset(offset)
        case {"shift": int(count), **rest} if not rest and _is_whole(count):
            return Target.shift(count)
        case {"time": str(moment), **rest} if not rest:
            return Target.time(_moment(moment))
        case {"epoch": epoch, **rest} if not rest:
            return Target.at_epoch(tuple(epoch) if isinstance(epoch, list) else epoch)
        case {"offsets": dict(offsets), **rest} if not rest:
            return Target.offsets({_id(stream): _offset(offset) for stream, offset in offsets.items()})
        case other:
            raise UsageError(f"'to' is {other!r:.80}: give {_TARGETS}.")


def _moment(told: str) -> datetime:
    try:
        return datetime.fromisoformat(told)
    except ValueError:
        raise UsageError(f"time {told!r:.60}: write it as 2026-01-31T12:00:00Z.") from None


def _id(told: str) -> int:
    if not (told.isascii() and told.isdecimal() and len(told) < 20):
        raise UsageError(f"stream {told!r:.60}: it is a number.")
    return int(told)


def _offset(told: object) -> int:
    if not _is_whole(told):
        raise UsageError(f"offset {told!r:.60}: it is a number.")
    assert isinstance(told, int)
    return told


def _is_whole(told: object) -> bool:
    return isinstance(told, int) and not isinstance(told, bool)
