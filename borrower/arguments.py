"""What a consumer asks for, checked before anything is opened: a node would refuse it too, but later and elsewhere."""

from __future__ import annotations

from protocol.errors import InvalidSetting
from protocol.messages import MAX_WEIGHT

STARTS = ("latest", "earliest")


def check_arguments(*, weight: float, start: str, batch_bytes: int) -> None:
    """Raise `InvalidSetting` for the first that cannot be."""
    if not 0 < weight <= MAX_WEIGHT:
        raise InvalidSetting(
            f"weight is {weight}: it must be above 0 and at most {MAX_WEIGHT:g}. 1 is what everybody has, 2 takes "
            "twice as many streams."
        )
    if start not in STARTS:
        raise InvalidSetting(f"start is {start!r}: a group begins at `{'` or `'.join(STARTS)}`.")
    if batch_bytes < 1:
        raise InvalidSetting(f"batch_bytes is {batch_bytes}: it must be positive. A block is the least that is read.")
