"""Checks a publisher's arguments before anything is opened."""

from __future__ import annotations

import math
import operator

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.limits import MAX_ID_BYTES

MAX_BYTES = 16 * 1024 * 1024
"""The largest message, and about the largest block: half of what readers decode (`arrow_batch_decoder`)."""

MAX_COUNT = 2**31 - 1
MAX_LINGER_MS = 24 * 3600 * 1000.0

FEED_PREFIX = "feed/"
"""Prefix of the ids of producers at nodes, so that none can fence a publisher that has access to the database."""

HINT = "Leave it out for the default."


def check_int(name: str, value: object, maximum: int = MAX_COUNT) -> int:
    """Return the value as an int. Raise `InvalidSetting` unless it is an integer from 1 to `maximum`."""
    number = _to_index(value)
    if number is None:
        raise InvalidSetting(f"{name} {format_value(value)}: must be a whole number. {HINT}")
    if number < 1:
        raise InvalidSetting(f"{name} {format_value(value)}: must be at least 1. {HINT}")
    if number > maximum:
        raise InvalidSetting(f"{name} {format_value(value)}: must be at most {maximum}. {HINT}")
    return number


def check_duration(name: str, value: object, maximum: float, hint: str = HINT, minimum: float = 0) -> float:
    """Return a number from `minimum` to `maximum`, in the unit that the name bears. Raise `InvalidSetting`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or not minimum <= value <= maximum
    ):
        raise InvalidSetting(
            f"{name} {format_value(value)}: must be a number from {minimum:g} to {maximum:.12g}. {hint}"
        )
    return float(value)


def check_text(name: str, value: object) -> str | None:
    """Return the text, or None. Raise `InvalidSetting`."""
    if value is not None and not isinstance(value, str):
        raise InvalidSetting(f"{name} of type {type(value).__name__}: must be text. {HINT}")
    return value


def check_producer_name(value: object) -> str | None:
    """Return a producer's name, or None. Raise `InvalidSetting`."""
    name = check_text("producer", value)
    if name is not None and not (name.isprintable() and 0 < len(name.encode()) <= MAX_ID_BYTES):
        raise InvalidSetting(
            f"producer {format_value(name)}: must be printable, of 1 to {MAX_ID_BYTES} bytes of UTF-8. Choose a "
            "shorter or plainer name, or leave it out."
        )
    if name is not None and name.startswith(FEED_PREFIX):
        raise InvalidSetting(
            f"producer {format_value(name)}: must be no name of a producer at a node, as those that begin with "
            f"{FEED_PREFIX} are. Choose another name, or leave it out."
        )
    return name


def _to_index(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def format_value(value: object) -> str:
    """Return as much of a rejected value as an error needs; a number has no quotes."""
    return ascii(value)[:60]
