"""Cost of validating a block before it is read: `python -m bench.decode`.

Readers decode a block with `sublet_storage.log.arrow_batch_decoder`. It is compared with the same work without
validation: Arrow's reading of the record batch, and the restoring of what is not stored.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from bench import _report as report
from bench._report import Beside
from sublet_storage.log import column_encoding
from sublet_storage.log.arrow_batch_decoder import decode_block
from sublet_storage.log.block_encoder import MIN_COMPRESSED, encode
from sublet_storage.log.column_encoding import BLOCK_SCHEMA

VALUE_BYTES = 100
SHAPES = {
    "values": "of one topic",
    "keys": "with keys and 50 topics",
    "headers": "with keys, 50 topics and a header",
    "runs": "of 100 topics, one after the other, and one key each",
}
PROSE = """A reader validates each block before anything is made of it, without a setting: the header, the number of
messages and how large they become, `validate(full=True)`, run ends, and the values of topics, timestamps, headers and
epochs. *Measured* is one block of messages of {value} bytes decoded so; beside it the same without validation, by
`pyarrow.ipc.read_record_batch`. Medians of {rounds} calls each, taken in turns, with the payload in memory. The ratio
is large where decoding alone copies nothing; what it comes to for each message is below the table."""


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the tables."""
    parser = argparse.ArgumentParser(prog="bench.decode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--messages", type=int, nargs="+", default=[1, 1000, 10_000], help="of a block")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args(arguments)
    figures = [
        _measure(count, shape, compression, options.rounds)
        for count in options.messages
        for shape in SHAPES
        for compression in (("none", "zstd") if count >= MIN_COMPRESSED else ("none",))
    ]
    largest = [each for each in figures if each.what.startswith(f"{max(options.messages):,} ")]
    per_message = max(1e3 * (each.value - each.beside) / max(options.messages) for each in largest)
    settings = {"rounds": options.rounds, "messages": options.messages, "value_bytes": VALUE_BYTES}
    body = {"figures": [each.judged() for each in figures], "dearest_ns_per_message": report.significant(per_message)}
    report.save("decode", settings, body, options.json)
    dearest = f"At {max(options.messages):,} messages a block: at most {per_message:.0f} ns a message more."
    section = f"{report.table(figures)}\n{dearest}\n"
    report.page(options.page, "decode", PROSE.format(value=VALUE_BYTES, rounds=options.rounds), section)
    print(section)


def _measure(count: int, shape: str, compression: str, rounds: int) -> Beside:
    codec, stored = encode(_batch(count, shape), compression)
    payload, flags = stored.to_pybytes(), column_encoding.decode_flags(codec)
    schema = column_encoding.stored_schema(flags)

    def unseen() -> pa.RecordBatch:
        return column_encoding.restore_columns(flags, pa.ipc.read_record_batch(pa.py_buffer(payload), schema))

    validated, plain = _medians_us(rounds, lambda: decode_block(codec, payload, 1, count, count), unseen)
    what = f"{count:,} message{'s' * (count > 1)} {SHAPES[shape]}, {'plain' if compression == 'none' else compression}"
    return Beside(what, validated, "us", "without validation", plain)


def _batch(count: int, shape: str) -> pa.RecordBatch:
    topics, is_run = (1 if shape == "values" else 50), shape == "runs"
    keys = [os.urandom(8) for _ in range(100)]
    rows = [
        {
            "topic": f"orders/{number * 100 // count if is_run else number % topics}/created",
            "key": keys[number * 100 // count] if is_run else None if shape == "values" else os.urandom(8),
            "value": os.urandom(VALUE_BYTES // 2) + bytes(VALUE_BYTES // 2),
            "headers": [{"key": "trace", "value": os.urandom(16)}] if shape == "headers" else None,
            "timestamp": 1_700_000_000_000_000 + number,
        }
        for number in range(count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=BLOCK_SCHEMA)


def _medians_us(rounds: int, *acts: Callable[[], object]) -> list[float]:
    times: list[list[float]] = [[] for _ in acts]
    for _ in range(rounds):
        for act, mine in zip(acts, times, strict=True):
            began = time.perf_counter()
            act()
            mine.append(1e6 * (time.perf_counter() - began))
    return [statistics.median(each) for each in times]


if __name__ == "__main__":
    main()
