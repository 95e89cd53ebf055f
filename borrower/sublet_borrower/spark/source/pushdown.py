"""The filters that Spark pushes down, and those left to Spark; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pyspark.sql import datasource as spark

from sublet_borrower.spark.common.source_columns import NEVER_NULL
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_storage.readers.offset_ranges import OffsetRange


class PushedFilters(Struct, frozen=True):
    """The conditions that all rows of a query meet. None: no condition; `start` and `end` are offsets."""

    topics: frozenset[str] | None = None
    prefix: str = ""
    spaces: frozenset[str] | None = None
    streams: frozenset[int] | None = None
    start: int = 0
    end: int = MAX_OFFSET
    min_timestamp: datetime | None = None
    max_timestamp: datetime | None = None

    def prune(self, offset_ranges: Iterable[OffsetRange]) -> Iterator[OffsetRange]:
        """Yield the parts of these ranges that can have rows that match."""
        for offset_range in offset_ranges:
            start, end = max(offset_range.start, self.start), min(offset_range.end, self.end)
            if start < end and self._may_match(offset_range):
                yield replace(offset_range, start=start, end=end)

    def _may_match(self, offset_range: OffsetRange) -> bool:
        return (
            (self.spaces is None or offset_range.space in self.spaces)
            and (self.streams is None or offset_range.stream_id in self.streams)
            and (self.topics is None or any(map(offset_range.generation_filter.matches, self.topics)))
        )


NO_FILTERS = PushedFilters()


def split_filters(filters: Iterable[spark.Filter]) -> tuple[PushedFilters, list[spark.Filter]]:
    """Return the conditions of all filters together, and the filters that Spark has to apply itself: those not
    understood, and times, which decide over entire blocks only."""
    pushed, left = NO_FILTERS, []
    for each in filters:
        combined = _add_filter(pushed, each)
        pushed = combined or pushed
        if combined is None or _get_column(each) == "timestamp":
            left.append(each)
    return pushed, left


def _add_filter(pushed: PushedFilters, each: Any) -> PushedFilters | None:
    """Return the filters with this one added; None if it is left to Spark."""
    column = _get_column(each)
    if isinstance(each, spark.IsNotNull):
        return pushed if column in NEVER_NULL else None
    if column == "topic" and isinstance(each, spark.StringStartsWith):
        return _add_prefix(pushed, each.value) if _is_plain(each.value, str) else None
    if (values := _get_values(each)) is not None and column in _ONE_OF:
        field, kind = _ONE_OF[column]
        return _add_values(pushed, field, values) if all(_is_plain(value, kind) for value in values) else None
    if column in _COMPARED and (compare := _COMPARED[column].get(type(each))) is not None:
        return compare(pushed, each.value) if _is_comparable(column, each.value) else None
    return None


def _get_column(each: Any) -> str:
    """Return the name of the column; of a part of one, or of a negated filter, a name that no column has."""
    return ".".join(getattr(each, "attribute", ()))


def _get_values(each: Any) -> tuple[Any, ...] | None:
    if isinstance(each, spark.EqualTo | spark.EqualNullSafe):
        return (each.value,)
    return tuple(each.value) if isinstance(each, spark.In) else None


def _add_values(pushed: PushedFilters, field: str, values: Iterable[Any]) -> PushedFilters:
    current_values, new_values = getattr(pushed, field), frozenset(values)
    both: Any = {field: new_values if current_values is None else new_values & current_values}
    return replace(pushed, **both)


def _add_prefix(pushed: PushedFilters, prefix: str) -> PushedFilters | None:
    """Return the filters with this prefix too, if one of the two prefixes begins with the other; else None."""
    if prefix.startswith(pushed.prefix):
        return replace(pushed, prefix=prefix)
    return pushed if pushed.prefix.startswith(prefix) else None


def _is_plain(value: object, kind: type) -> bool:
    """Return whether the value is of this type, and no text with a NUL, which no message in Postgres has."""
    return type(value) is kind and not (isinstance(value, str) and "\0" in value)


def _is_comparable(column: str, value: object) -> bool:
    """Return whether the value can be compared with the column; a time needs a zone, else its clock is unknown."""
    return type(value) is int if column == "offset" else isinstance(value, datetime) and value.tzinfo is not None


def _limit_start(pushed: PushedFilters, offset: int) -> PushedFilters:
    return replace(pushed, start=max(pushed.start, offset))


def _limit_end(pushed: PushedFilters, offset: int) -> PushedFilters:
    return replace(pushed, end=min(pushed.end, offset))


def _limit_min_timestamp(pushed: PushedFilters, when: datetime) -> PushedFilters:
    return replace(pushed, min_timestamp=when if pushed.min_timestamp is None else max(pushed.min_timestamp, when))


def _limit_max_timestamp(pushed: PushedFilters, when: datetime) -> PushedFilters:
    return replace(pushed, max_timestamp=when if pushed.max_timestamp is None else min(pushed.max_timestamp, when))


_ONE_OF: dict[str, tuple[str, type]] = {"topic": ("topics", str), "space": ("spaces", str), "stream": ("streams", int)}
_COMPARED: dict[str, dict[type, Callable[[PushedFilters, Any], PushedFilters]]] = {
    "offset": {
        spark.EqualTo: lambda pushed, value: _limit_end(_limit_start(pushed, value), value + 1),
        spark.GreaterThanOrEqual: _limit_start,
        spark.GreaterThan: lambda pushed, value: _limit_start(pushed, value + 1),
        spark.LessThan: _limit_end,
        spark.LessThanOrEqual: lambda pushed, value: _limit_end(pushed, value + 1),
    },
    "timestamp": {
        spark.EqualTo: lambda pushed, value: _limit_max_timestamp(_limit_min_timestamp(pushed, value), value),
        spark.GreaterThanOrEqual: _limit_min_timestamp,
        spark.GreaterThan: _limit_min_timestamp,
        spark.LessThan: _limit_max_timestamp,
        spark.LessThanOrEqual: _limit_max_timestamp,
    },
}
