"""What it costs to look at a block before it is read: `python -m bench.decode`.

Medians, in microseconds a block: reading it as Arrow does, with nothing looked at; `validate(full=True)` on that; and
what readers do, `sublet_storage.log.block.decode`, which is both with the envelope, and the columns restored.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import pyarrow as pa

from sublet_storage.log import column_encoding
from sublet_storage.log.block import decode, encode
from sublet_storage.log.column_encoding import BLOCK_SCHEMA

ROUNDS = 60
VALUE_BYTES = 100


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each shape."""
    argparse.ArgumentParser(prog="bench.decode", description=__doc__).parse_args(arguments)
    print(f"{'messages':>8} {'columns':8} {'stored':6} {'bytes':>8} {'Arrow':>7} {'validate':>8} {'decode':>7}")
    for count in (1, 1000, 10_000):
        for columns in ("values", "keys", "headers"):
            for compression in ("none", "zstd"):
                _measure(count, columns, compression)


def _measure(count: int, columns: str, compression: str) -> None:
    codec, stored = encode(_batch(count, columns), compression)
    payload, schema = stored.to_pybytes(), column_encoding.stored_schema(column_encoding.decode_flags(codec))
    read = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
    times = (
        _median_us(lambda: pa.ipc.read_record_batch(pa.py_buffer(payload), schema)),
        _median_us(lambda: read.validate(full=True)),
        _median_us(lambda: decode(codec, payload, 1, count, count)),
    )
    arrow, validate, entire = times
    print(f"{count:8} {columns:8} {compression:6} {len(payload):8} {arrow:7.0f} {validate:8.0f} {entire:7.0f}")


def _batch(count: int, columns: str) -> pa.RecordBatch:
    """Values of one topic; with keys and 50 topics; and with a header."""
    plain = columns == "values"
    rows = [
        {
            "topic": "orders/eu/created" if plain else f"orders/{number % 50}/created",
            "key": None if plain else os.urandom(8),
            "value": os.urandom(VALUE_BYTES // 2) + bytes(VALUE_BYTES // 2),
            "headers": [{"key": "trace", "value": os.urandom(16)}] if columns == "headers" else None,
            "timestamp": 1_700_000_000_000_000 + number,
        }
        for number in range(count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=BLOCK_SCHEMA)


def _median_us(act: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
