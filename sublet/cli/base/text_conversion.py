"""Converts messages, times and durations to and from text."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base.output import escape_control_characters
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import parse_natural
from sublet_protocol.domain.subscriptions import MAX_OFFSET, StartingPosition

if TYPE_CHECKING:
    import pyarrow as pa


GroupName = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The group, as it subscribes. Quote it.")]
"""The argument that names a group."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.ASCII)
MAX_JSON_FILE_BYTES = 64 << 20
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def format_seconds(seconds: float | None) -> str | None:
    """Return a duration in seconds, rounded."""
    return None if seconds is None else f"{seconds:.0f} s"


def bytes_to_json(data: bytes | None) -> Any:
    """Return bytes as text where they are UTF-8, else as `{"base64": ...}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def bytes_from_json(field: str, value: Any) -> bytes | None:
    """Return the bytes of `bytes_to_json`'s result; other JSON than text becomes compact JSON. Raise `UsageError`."""
    if value is None:
        return None
    if isinstance(value, str):
        return _encode_text(field, value)
    if isinstance(value, dict) and value.keys() == {"base64"}:
        try:
            return base64.b64decode(value["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise UsageError(f"{field}: its base64 is malformed. Encode the bytes again.") from None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # such as 1e999: what is read as infinite cannot be written again
        raise UsageError(f"{field}: holds a number out of range. Give it as text.") from None
    return _encode_text(field, text)


def _encode_text(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UsageError(f'{field}: holds a lone surrogate, which is not text. Give {{"base64": ...}}.') from None


def messages_to_json(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows as objects for JSON."""
    import pyarrow.compute as pc

    names = ("topic", "key", "value", "headers", "epoch", "stream", "offset")
    columns = [batch.column(name).to_pylist() for name in names]
    times = pc.strftime(batch.column("timestamp"), format="%Y-%m-%dT%H:%M:%SZ").to_pylist()
    for topic, key, value, headers, epoch, stream_id, offset, timestamp in zip(*columns, times, strict=True):
        yield {
            "topic": topic,
            "key": bytes_to_json(key),
            "value": bytes_to_json(value),
            "headers": None if headers is None else [_header_to_json(pair) for pair in headers],
            "timestamp": timestamp,
            "epoch": epoch,
            "stream_id": stream_id,
            "offset": offset,
        }


def _header_to_json(pair: dict[str, Any] | None) -> list[Any]:
    """Return name and value; [None, None] for a null pair, which our publishers do not store."""
    return [None, None] if pair is None else [pair["key"], bytes_to_json(pair["value"])]


def format_messages(batch: pa.RecordBatch | pa.Table, coloured: bool) -> Iterator[str]:
    """Yield the rows for people: topic, key and value, separated by tabs. Characters that could move a cursor are
    escaped."""
    dim, plain = (_DIM, _PLAIN) if coloured else ("", "")
    columns = (batch.column(name).to_pylist() for name in ("topic", "key", "value"))
    for topic, key, value in zip(*columns, strict=True):
        yield f"{dim}{escape_control_characters(topic)}\t{_format_text(key)}{plain}\t{_format_text(value)}"


def _format_text(data: bytes | None) -> str:
    if data is None:
        return ""
    try:
        return escape_control_characters(data.decode())
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()


def parse_seconds(text: str) -> int:
    """Parse a duration such as 90s, 15m, 6h, 7d, 2w or 0 into integral seconds. Raise `UsageError`."""
    seconds = parse_fractional_seconds(text)
    if not seconds.is_integer():
        raise UsageError(f"duration {text!r}: it is no whole number of seconds. Round it.")
    return int(seconds)


def parse_fractional_seconds(text: str) -> float:
    """Parse a duration in seconds, also with fractions, such as 0.5s; only 0 needs no unit. Raise `UsageError`."""
    duration = text.strip()
    match = _DURATION.fullmatch(duration)
    if match is not None:
        return round(float(match[1]) * _UNITS[match[2]], 6)
    if duration == "0":
        return 0.0
    if duration.isascii() and duration.isdigit():
        raise UsageError(
            f"duration {text!r}: it has no unit. Say of what: {duration}s, {duration}m, {duration}h, {duration}d or "
            f"{duration}w "
            "(seconds, minutes, hours, days, weeks)."
        )
    raise UsageError(f"duration {text!r}: give a number and s, m, h, d or w, such as 90s or 7d.")


def format_utc(at_us: int) -> str:
    """Return a time in microseconds since 1970 in the form of a starting position."""
    return str(StartingPosition.at_time(at_us))


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 1-3, 7."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_int(option: str, text: str, minimum: int = 0) -> int:
    """Parse an integer that Postgres can hold. Raise `UsageError`."""
    number = parse_natural(text, MAX_OFFSET)
    if number is None or number < minimum:
        raise UsageError(f"{option} {text!r}: give a whole number of at least {minimum}, and at most {MAX_OFFSET}.")
    return number


def read_json_file(source: str, file: Path) -> Any:
    """Return the content of a JSON file. Raise `UsageError`."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_JSON_FILE_BYTES + 1)
        if len(content) > MAX_JSON_FILE_BYTES:
            raise UsageError(f"{source}: it has more than {MAX_JSON_FILE_BYTES} bytes. Divide it.")
        return json.loads(content)
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: it is not JSON ({error}). Make one with `sublet groups export`.") from None


def parse_number(option: str, text: str) -> float:
    """Parse a number. Raise `UsageError`."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option} {text!r}: give a number, such as 2 or 0.5.") from None


def parse_time(option: str, text: str) -> datetime:
    """Parse a time with its zone, and return it in UTC. Raise `UsageError`, which names the option."""
    try:
        when = datetime.fromisoformat(text)
        if when.tzinfo is not None:
            return when.astimezone(UTC)
        hint = "Add the time zone: Z for UTC, or +01:00 say"
    except OverflowError:
        hint = "In UTC this one is before the year 1 or after 9999"
    except ValueError:
        hint = "Correct it"
    raise UsageError(f"{option} {text!r}: give a time such as 2026-01-31T12:00:00Z. {hint}.")


def parse_ago(option: str, text: str, instead: str) -> datetime:
    """Return the time that long ago. Raise `UsageError`, with the hint `instead`, if there is no such time."""
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_fractional_seconds(text))
    except OverflowError:
        raise UsageError(f"{option} {text!r}: it is longer than time is. Use {instead}.") from None


def parse_starting_position(text: str) -> str | int | datetime:
    """Parse `earliest` or `latest`, which are returned as they are, an offset, or a time, also as a duration before
    now. Raise `UsageError`."""
    if text in ("earliest", "latest"):
        return text
    if text == "active":
        raise UsageError("--from 'active': is for whole epochs. Add --epochs, or begin elsewhere.")
    if text.isascii() and text.isdigit():
        return parse_int("--from", text)
    if _DURATION.fullmatch(text):
        return parse_ago("--from", text, "earliest")
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"--from {text!r}: give earliest, latest, an offset such as 1000, a time such as 2026-01-31T12:00 (UTC "
            "unless it says otherwise), or a duration such as 15m for that long ago."
        ) from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)
