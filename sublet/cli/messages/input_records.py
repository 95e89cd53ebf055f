"""Parses the input of `sublet publish` into columns: lines, or NDJSON records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from sublet.cli.base.text_conversion import bytes_from_json
from sublet_protocol.domain.errors import SubletError, UsageError, ValueTooLarge
from sublet_protocol.domain.topics import check_topic
from sublet_storage.producer.batches.input_conversion import as_headers, as_timestamp_us, check_size, size_of

READ_BYTES = 256 * 1024
MAX_LINE = 16 * 1024 * 1024
"""Bytes: a longer line is rejected."""

HINT = "publish it in Python: Publisher(max_message_bytes=...)."
"""The hint for a message over the limit, for which this command has no option."""

FIELDS = frozenset({"topic", "key", "value", "headers", "timestamp"})
IGNORED = frozenset({"stream_id", "offset", "grant_id"})
"""Fields that `tail` and `consume` print and a publisher does not take."""

Columns = dict[str, Any]


def read_columns(
    read: Callable[[int], bytes], layout: str, topic: str | None, key: bytes | None, limit: int
) -> Iterator[Columns]:
    """Iterate over complete messages as they come in, as columns; no chunk is empty.

    A bad one raises a `SubletError` with its line, after everything before it was yielded.
    """
    parser = NdjsonParser(topic, key, limit) if layout == "ndjson" else LineParser(topic, key, limit)
    number = 1
    for lines in read_lines(read):
        columns, problem = parser.parse_columns(lines, number)
        if columns["value"]:
            yield columns
        if problem is not None:
            raise problem
        number += len(lines)


def read_lines(read: Callable[[int], bytes]) -> Iterator[list[bytes]]:
    """Yield lines without their ends, all those of one read at a time; the last line may lack its end."""
    remainder = b""
    while data := read(READ_BYTES):
        if b"\n" not in data:
            remainder += data
            if len(remainder) > MAX_LINE:
                raise ValueTooLarge(f"a line is longer than {MAX_LINE} bytes. Is the input text, and complete?")
            continue
        data = remainder + data
        *lines, remainder = data.split(b"\n")
        yield [line.removesuffix(b"\r") for line in lines] if b"\r" in data else lines
    if remainder:
        yield [remainder]


class LineParser:
    """Parses lines, each the value of a message."""

    def __init__(self, topic: str | None, key: bytes | None, limit: int) -> None:
        if topic is None:
            raise UsageError("no topic: lines say nothing of theirs. Run: sublet publish TOPIC")
        self._topic, self._key, self._limit = check_topic(topic), key, limit

    def parse_columns(self, lines: list[bytes], number: int) -> tuple[Columns, SubletError | None]:
        """Return the columns of the lines before the first bad one, and its error; None if all are good."""
        problem = None
        spare = self._limit - size_of(self._topic, self._key, None, None)
        if max(map(len, lines)) > spare:
            index = next(index for index, line in enumerate(lines) if len(line) > spare)
            problem = _too_large_error(number + index, self._topic, self._key, lines[index], self._limit)
            lines = lines[:index]
        columns: Columns = {"topic": self._topic, "value": lines}
        if self._key is not None:
            columns["key"] = self._key
        return columns, problem


class NdjsonParser:
    """Parses lines that are each an object with `value`, and optionally `key`, `topic`, `headers`, `timestamp`."""

    def __init__(self, topic: str | None, key: bytes | None, limit: int) -> None:
        self._topic = None if topic is None else check_topic(topic)
        self._key, self._limit = key, limit

    def parse_columns(self, lines: list[bytes], number: int) -> tuple[Columns, SubletError | None]:
        """Return the columns of the lines before the first bad one, and its error; None if all are good."""
        rows: list[tuple[Any, ...]] = []
        problem: SubletError | None = None
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                rows.append(self._parse_row(f"line {number + index}", line))
            except SubletError as error:
                problem = error
                break
        names = ("topic", "key", "value", "headers", "timestamp")
        return {name: [row[at] for row in rows] for at, name in enumerate(names)}, problem

    def _parse_row(self, location: str, line: bytes) -> tuple[Any, ...]:
        record = _parse_object(location, line)
        topic = record.get("topic", self._topic)
        if not isinstance(topic, str):
            raise UsageError(f'{location}: no topic. Put "topic" into the record, or give one: sublet publish TOPIC')
        key = bytes_from_json(f"{location}: key", record["key"]) if "key" in record else self._key
        value = bytes_from_json(f"{location}: value", record["value"])
        headers = _parse_headers(location, record.get("headers"))
        timestamp = _parse_timestamp(location, record.get("timestamp"))
        try:
            check_topic(topic)
            headers, timestamp_us = as_headers(headers), as_timestamp_us(timestamp)
        except SubletError as error:
            raise type(error)(f"{location}: {error}") from None
        check_size(size_of(topic, key, value, headers), self._limit, location, HINT)
        return topic, key, value, headers, timestamp_us


def _too_large_error(number: int, topic: str, key: bytes | None, value: bytes, limit: int) -> ValueTooLarge:
    try:
        check_size(size_of(topic, key, value, None), limit, f"line {number}", HINT)
    except ValueTooLarge as error:
        return error
    raise AssertionError(f"line {number} is not too large")


def _parse_object(location: str, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{location} is not JSON ({error}). To publish lines as they are, use --format lines."
        ) from None
    if not isinstance(record, dict) or "value" not in record:
        raise UsageError(
            f'{location}: give an object with a "value", such as {{"key": "a", "value": "b"}}. To publish lines as '
            "they are, JSON or not, use --format lines."
        )
    if (epoch := record.pop("epoch", None)) is not None:
        raise UsageError(
            f"{location}: epoch {epoch}: this command publishes in no epoch. Publish it in Python: "
            "Publisher.in_epoch(epoch).publish(...); or leave the field out."
        )
    if unknown := record.keys() - FIELDS - IGNORED:
        raise UsageError(
            f"{location}: no such fields: {', '.join(sorted(unknown))}. There are: {', '.join(sorted(FIELDS))}."
        )
    return record


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _parse_headers(location: str, headers: Any) -> list[tuple[str, bytes | None]] | None:
    if not headers:
        return None
    pairs = list(headers.items()) if isinstance(headers, dict) else headers
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise UsageError(f'{location}: headers: give an object, or a list of ["name", "value"] pairs.')
    return [(name, bytes_from_json(f"{location}: header {name!r}", value)) for name, value in pairs]


def _parse_timestamp(location: str, text: Any) -> datetime | None:
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise UsageError(f"{location}: timestamp {text!r}: give a time such as 2026-01-31T12:00:00Z.") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)
