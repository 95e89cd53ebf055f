"""Bounds of the metrics and of the lag history."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from sublet_protocol.domain.errors import InvalidSetting

PREFIX = "SUBLET_HTTP_"


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Whole numbers, every one."""

    max_stream_series: int = 2000
    """Most series of single streams of groups that a node exports; groups beyond them have only their sums."""
    max_group_series: int = 2000
    """Most groups of which a node exports metrics; of the others it exports how many they are."""
    lag_history_minutes: int = 30
    """For how long a node remembers how far behind groups were, for the curves of its page; 0: not at all."""
    lag_history_max_groups: int = 10000
    """Most groups whose curves a node remembers."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> HttpSettings:
        """Defaults, overridden by `SUBLET_HTTP_MAX_STREAM_SERIES` and so on. Raises `InvalidSetting`."""
        source = os.environ if environ is None else environ
        names = {field.name: PREFIX + field.name.upper() for field in fields(cls)}
        return replace(
            cls(), **{field: _integer(name, source[name]) for field, name in names.items() if name in source}
        )


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidSetting(f"{name} is {text[:40]!r}: it must be a whole number, such as 2000.")
    return int(text)
