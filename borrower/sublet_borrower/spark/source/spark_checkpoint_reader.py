"""Reads what Spark has written into a query's checkpoint, wherever the checkpoint is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sublet_protocol.domain.errors import UsageError

_HINT = "give the guard the checkpointLocation of the query, and the number that foreachBatch was called with."
_FIRST_OFFSET = 2
"""Before the offsets, a line each, the log has its version and the batch's settings."""


def check_checkpoint(checkpoint: str) -> None:
    """Raise `UsageError` for the checkpoint of a query that keeps state, or of another than the one that calls."""
    if _is_there(f"{checkpoint}/state"):
        raise UsageError(
            f"the query of checkpoint {checkpoint} keeps state, and would not see messages again that the guard says "
            "are done. Use a sink that is idempotent by batch instead: format('sublet'), or a table with the batch's "
            "number in its key."
        )
    running = _query_id()
    if running is not None and running != json.loads(_read_lines(f"{checkpoint}/metadata")[0])["id"]:
        raise UsageError(f"checkpoint {checkpoint} is not that of the query that calls the guard: {_HINT}")


def read_offsets(checkpoint: str, batch_id: int) -> dict[str, Any]:
    """Return {source: its offset of a batch as it is in the log}; None for a source that has none. Raises
    `UsageError`."""
    try:
        lines = _read_lines(f"{checkpoint}/offsets/{batch_id}")
    except FileNotFoundError:
        raise UsageError(f"there is no batch {batch_id} in checkpoint {checkpoint}: {_HINT}") from None
    version, offsets = "".join(lines[:1]), lines[_FIRST_OFFSET:]
    if version == "v2":
        return {source: _parse_line(line) for source, _, line in (each.partition(":") for each in offsets)}
    if version != "v1":
        raise UsageError(
            f"the log of batch {batch_id} in checkpoint {checkpoint} is of version {version!r}, and a guard reads v1 "
            "and v2. Start the query with a new checkpoint, and spark.sql.streaming.offsetLog.formatVersion=1."
        )
    return {str(number): _parse_line(line) for number, line in enumerate(offsets)}


def _parse_line(line: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return None


def _query_id() -> str | None:
    """Return the checkpoint of the query in whose thread this runs; None where it is not known, as on Spark Connect."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    return None if context is None else context.getLocalProperty("sql.streaming.queryId")


def _find_local_path(location: str) -> Path | None:
    """Return the path of what lies in this machine's files, by its URL or without one."""
    parts = urlsplit(location)
    if not parts.scheme:
        return Path(location)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _is_there(location: str) -> bool:
    path = _find_local_path(location)
    if path is not None and (path.parent.exists() or urlsplit(location).scheme):
        return path.exists()
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession

    try:
        return bool(SparkSession.active().read.text(location).schema)
    except (AnalysisException, RuntimeError):  # no such path, or no Spark that could look elsewhere
        return False


def _read_lines(location: str) -> Sequence[str]:
    """Return the lines of a file. Raise `FileNotFoundError`."""
    path = _find_local_path(location)
    if path is not None and (path.exists() or urlsplit(location).scheme):
        return path.read_text().splitlines()
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession

    try:
        return [row.value for row in SparkSession.active().read.text(location).collect()]
    except (AnalysisException, RuntimeError):  # no such path, or no Spark that could look elsewhere
        raise FileNotFoundError(location) from None
