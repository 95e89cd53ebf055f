"""Lists names in a message: the first ones, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMED = 5


def format_names(names: Sequence[str], most: int = MAX_NAMED, total: int | None = None) -> str:
    """Return the first `most` of these names, and how many more there are. `total`: if these are not all."""
    unnamed = (len(names) if total is None else total) - most
    return ", ".join(names[:most]) + (f" and {unnamed} more" if unnamed > 0 else "")
