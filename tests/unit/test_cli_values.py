"""Messages as text, and text as messages."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sublet.cli.base import text_conversion
from sublet.cli.base.output import escape_control_characters
from sublet.cli.base.text_conversion import (
    MAX_JSON_FILE_BYTES,
    format_messages,
    messages_to_json,
    parse_fractional_seconds,
    parse_int,
    parse_seconds,
    parse_starting_position,
    parse_time,
    read_json_file,
)
from sublet.cli.groups.names import unescape
from sublet.cli.messages import input_records
from sublet.cli.messages.input_records import LineParser, NdjsonParser, read_lines
from sublet_protocol.domain.errors import UsageError, ValueTooLarge
from sublet_storage.log.block_encoder import DELIVERED_SCHEMA
from sublet_storage.producer.batches.input_conversion import size_of


def test_a_stored_header_without_a_name_is_shown() -> None:
    """No publisher of ours stores such a thing any more; what is stored must be readable all the same."""
    headers = [[None, {"key": None, "value": b"x"}, {"key": "a", "value": None}], None]
    columns: dict[str, list[Any]] = {
        "topic": ["t"] * 2,
        "key": [None] * 2,
        "value": [b"v"] * 2,
        "headers": headers,
        "timestamp": [datetime(2026, 1, 1, tzinfo=UTC)] * 2,
        "epoch": [None] * 2,
        "stream": [1] * 2,
        "offset": [0, 1],
    }
    batch = pa.record_batch([pa.array(columns[field.name], field.type) for field in DELIVERED_SCHEMA], DELIVERED_SCHEMA)
    first, second = json.loads(json.dumps(list(messages_to_json(batch))))
    assert first["headers"] == [[None, None], [None, "x"], ["a", None]]
    assert second["headers"] is None
    assert [(row["stream_id"], row["offset"]) for row in (first, second)] == [(1, 0), (1, 1)]
    assert len(list(format_messages(batch, coloured=False))) == 2


@pytest.mark.conforms("A9")
def test_numbers_and_times_out_of_range_are_refused() -> None:
    assert [parse_int("--limit", text, minimum=1) for text in ("1", str(2**63 - 1))] == [1, 2**63 - 1]
    with pytest.raises(UsageError, match="give a whole number of at least 1"):
        parse_int("--limit", "0", minimum=1)
    for text in (str(2**63), "9" * 20, "9" * 5000, "-1", "x", "²", "٣"):
        with pytest.raises(UsageError, match="give a whole number of at least 0, and at most 9223372036854775807"):
            parse_int("--limit", text)
    assert parse_starting_position(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(UsageError, match="--from '9223372036854775808': give a whole number of at least 0"):
        parse_starting_position(str(2**63))
    with pytest.raises(UsageError, match="--from 'active': is for whole epochs"):
        parse_starting_position("active")
    assert parse_time("--at", "2026-01-31T12:00:00+01:00") == datetime(2026, 1, 31, 11, tzinfo=UTC)
    for text, reported in (
        ("9999-12-31T23:59:59-14:00", "In UTC this one is before the year 1 or after 9999"),
        ("0001-01-01T00:00:00+14:00", "In UTC this one is before the year 1 or after 9999"),
        ("2026-01-31T12:00:00", "Add the time zone"),
        ("noon", "Correct it"),
    ):
        with pytest.raises(UsageError, match=reported):
            parse_time("--at", text)


@pytest.mark.conforms("A9")
def test_a_duration_has_a_unit() -> None:
    assert [parse_seconds(text) for text in ("90s", " 15 m", "6h", "7d", "2w", "1.5h", "1.1h", "0")] == [
        90, 900, 21_600, 604_800, 1_209_600, 5400, 3960, 0,
    ]  # fmt: skip
    assert parse_fractional_seconds("0.5s") == 0.5
    for text in ("7", "90", "00", "9" * 500):
        with pytest.raises(UsageError, match=f"it has no unit. Say of what: {text}s, {text}m, {text}h, {text}d or"):
            parse_fractional_seconds(text)
    for text in ("soon", "", "d", "-7d", "0.5", "nan", "infs", "7x", "7d3h", "\u0667d"):
        with pytest.raises(UsageError, match="give a number and s, m, h, d or w, such as 90s or 7d"):
            parse_seconds(text)
    for text in ("0.5s", "9" * 500 + "d"):
        with pytest.raises(UsageError, match="it is no whole number of seconds"):
            parse_seconds(text)
    with pytest.raises(UsageError, match=r"longer than time is\. Use earliest"):
        parse_starting_position("99999999999w")


def test_what_is_printed_escaped_is_read_again() -> None:
    for stored in ("evil\x1b]0;P\a", "a\nb\tc\r", "\x9b", "\u202eright", "\U000e0001", "plain", "ü☃", "a\u3164b"):
        assert unescape(escape_control_characters(stored)) == stored
    assert escape_control_characters("a\u3164\ufe0fb") == r"a\u3164\ufe0fb"
    for literal in (r"a\x41", r"a\q", r"\u00e9", r"\U0001f600", r"\ud800", r"\udfff", r"\x1", "a\\"):
        assert unescape(literal) == literal


@pytest.mark.conforms("A9")
def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 200_000, "{", "1" * 5000, "\ud800"):
        (tmp_path / "odd.json").write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(UsageError, match="it is not JSON"):
            read_json_file("--from-file odd.json", tmp_path / "odd.json")
    with pytest.raises(UsageError, match=f"more than {MAX_JSON_FILE_BYTES} bytes"):
        read_json_file("--from-file /dev/zero", Path("/dev/zero"))
    with pytest.raises(UsageError, match="No such file"):
        read_json_file("--from-file none.json", tmp_path / "none.json")


def test_a_file_of_so_many_bytes_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text_conversion, "MAX_JSON_FILE_BYTES", 10)
    (tmp_path / "file.json").write_text("[12345678]")
    assert read_json_file("--from-file", tmp_path / "file.json") == [12345678]
    (tmp_path / "file.json").write_text("[123456789]")
    with pytest.raises(UsageError, match="more than 10 bytes"):
        read_json_file("--from-file", tmp_path / "file.json")


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        (b'{"value": NaN}', "line 1 is not JSON (NaN is no number of JSON)"),
        (b'{"value": {"a": [1, -Infinity]}}', "line 1 is not JSON (-Infinity is no number of JSON)"),
        (b'{"value": 1e999}', "line 1: value: holds a number out of range. Give it as text."),
        (b'{"value": "x", "key": [1e999]}', "line 1: key: holds a number out of range"),
        (b'{"value": ["\\ud800"]}', "line 1: value: holds a lone surrogate, which is not text."),
        (b'{"value": "x", "headers": [["a", "b", "c"]]}', 'line 1: headers: give an object, or a list of ["name"'),
        (b'{"value": "x", "headers": {"\\ud800": ""}}', "line 1: header name '\\ud800' holds a lone surrogate"),
        (b'{"value": "x", "headers": [%s["a", 1]]}' % (b'["a", 1], ' * 100), "line 1: the message has 101 headers"),
        (b'{"value": "x", "headers": {"a": "%s"}}' % (b"v" * 16384), "line 1: the message has headers of 16385 bytes"),
        (b'{"value": "x", "timestamp": "0001-01-01T00:00:00+05:00"}', "line 1: timestamp -62135614800000000: outside"),
        (b'{"value": "x", "epoch": [7]}', "line 1: epoch [7]: this command publishes in no epoch."),
    ],
)
def test_what_cannot_be_published_is_refused(line: bytes, reported: str) -> None:
    columns, problem = NdjsonParser("t", None, 1000).parse_columns([line], 1)
    assert columns["value"] == []
    assert isinstance(problem, UsageError)
    assert reported in str(problem)


def test_only_base64_alone_stands_for_bytes() -> None:
    assert text_conversion.bytes_from_json("value", {"base64": "/w=="}) == b"\xff"
    assert text_conversion.bytes_from_json("value", {"base64": "/w==", "a": 1}) == b'{"base64":"/w==","a":1}'


def test_a_line_is_as_long_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_records, "MAX_LINE", 4)
    pieces = iter([b"ab", b"cd", b"\n"])
    assert list(read_lines(lambda _: next(pieces, b""))) == [[b"abcd"]]
    pieces = iter([b"ab\r", b"\ncd\n"])
    assert list(read_lines(lambda _: next(pieces, b""))) == [[b"ab", b"cd"]]
    pieces = iter([b"ab", b"cde", b"\n"])
    with pytest.raises(ValueTooLarge, match="a line is longer than 4 bytes"):
        list(read_lines(lambda _: next(pieces, b"")))


def test_a_value_fills_a_message_to_the_byte() -> None:
    fits = b"v" * (1000 - size_of("t", None, None, None))
    parser = LineParser("t", None, 1000)
    assert parser.parse_columns([fits], 1) == ({"topic": "t", "value": [fits]}, None)
    columns, problem = parser.parse_columns([fits, fits + b"v", fits], 1)
    assert columns["value"] == [fits]
    assert isinstance(problem, ValueTooLarge)
    assert "line 2" in str(problem)
