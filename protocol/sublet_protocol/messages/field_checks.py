"""Checks of single fields that a peer sent, before anything is built from them.

What is missing, out of range, too long or too many raises `MalformedMessage`, whose text goes to the sender.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import MAX_EXPLANATION_CHARACTERS, MAX_ID_BYTES, MAX_NUMBER, MAX_STREAMS

MAX_INT64 = 2**63 - 1
"""The greatest number of a signed field of 64 bits."""

_T = TypeVar("_T")


class MalformedMessage(UsageError):
    """A message that breaks the protocol's form; nothing of it was executed."""


def check_id(name: str, text: str, *, may_be_empty: bool = False) -> str:
    """Return an id or a name: printable, and not longer than such are."""
    check_text(name, text, MAX_ID_BYTES, may_be_empty=may_be_empty)
    if not text.isprintable():
        raise MalformedMessage(f"{name} {text[:40]!r}: all of its characters must be printable")
    return text


def check_text(name: str, text: str, limit_bytes: int, *, may_be_empty: bool = False) -> str:
    """Return the text. Raise `MalformedMessage` if it is missing, too long, or has a NUL, which Postgres rejects."""
    if not text and not may_be_empty:
        raise MalformedMessage(f"{name}: it is missing")
    if len(text) > limit_bytes or (len(text) * 4 > limit_bytes and len(text.encode()) > limit_bytes):
        size = len(text.encode())
        raise MalformedMessage(f"{name} {text[:40]!r}...: {size} bytes of UTF-8, and the limit is {limit_bytes}")
    if "\0" in text:
        raise MalformedMessage(f"{name} {text[:40]!r}: the character NUL is not allowed")
    return text


def check_explanation(name: str, text: str) -> str:
    """Return a text for people, which may be empty."""
    if len(text) > MAX_EXPLANATION_CHARACTERS:
        raise MalformedMessage(
            f"{name} {text[:40]!r}...: {len(text)} characters, and the limit is {MAX_EXPLANATION_CHARACTERS}"
        )
    return check_text(name, text, 4 * MAX_EXPLANATION_CHARACTERS, may_be_empty=True)


def check_naturals(wire: Any, *names: str) -> dict[str, Any]:
    """Return these fields by name, each of which is at least 0."""
    return {name: check_natural(name, getattr(wire, name)) for name in names}


def check_natural(name: str, value: int) -> int:
    """Return a number that is at least 0."""
    if value < 0:
        raise MalformedMessage(f"{name} {value}: it is never negative")
    return value


def check_number(name: str, value: int, min_value: int = 0, max_value: int = MAX_INT64) -> int:
    """Return a number from `min_value` to `max_value`."""
    if not min_value <= value <= max_value:
        raise MalformedMessage(f"{name} {value}: a whole number from {min_value} to {max_value}")
    return value


def check_count_number(name: str, value: int, min_value: int = 0) -> int:
    """Return a number that its sender counts up."""
    return check_number(name, value, min_value, MAX_NUMBER)


def check_time(name: str, value: float) -> float:
    """Return a finite number of seconds."""
    if not math.isfinite(value):
        raise MalformedMessage(f"{name} {value}: a time is a finite number of seconds")
    return value


def check_range(name: str, value: float, min_value: float, max_value: float) -> float:
    """Return a number from `min_value` to `max_value`."""
    if not min_value <= value <= max_value:
        raise MalformedMessage(f"{name} {value}: a number from {min_value:g} to {max_value:g}")
    return value


def check_entries(name: str, entries: Sequence[_T], limit: int) -> Sequence[_T]:
    """Return as many entries as one message may have."""
    if len(entries) > limit:
        raise MalformedMessage(f"{name}: {len(entries)} entries, and the limit is {limit}; send several messages")
    return entries


def check_streams(name: str, stream_ids: Iterable[int], count: int, limit: int = MAX_STREAMS) -> None:
    """Check that a message has not too many streams, each of them once."""
    if count > limit:
        raise MalformedMessage(f"{name}: {count} streams, and the limit is {limit}; send several messages")
    seen_ids: set[int] = set()
    for stream_id in stream_ids:
        if stream_id in seen_ids:
            raise MalformedMessage(f"{name}: stream {stream_id} is in it twice; name each stream once")
        seen_ids.add(stream_id)


def check_part(name: str, count: int, more: bool) -> None:
    """Check that a part that others follow has streams."""
    if more and not count:
        raise MalformedMessage(f"{name}: none, in a part that others follow (`more`); send no part without streams")
