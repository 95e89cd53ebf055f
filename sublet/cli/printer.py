"""Writes messages to stdout, up to a number of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.cli import values
from sublet.cli.output import Output, dumps

if TYPE_CHECKING:
    import pyarrow as pa


class Printer:
    """`limit`: how many messages in all; None is no limit. `count`: how many so far."""

    def __init__(self, output: Output, limit: int | None) -> None:
        self._output, self._limit = output, limit
        self._coloured = output.coloured
        self.count = 0

    @property
    def full(self) -> bool:
        """The limit is reached."""
        return self._limit is not None and self.count >= self._limit

    def show(self, batch: pa.RecordBatch | pa.Table, grant_id: int | None = None) -> int:
        """Write what the limit leaves of a batch; how many. They are out of this process when it returns."""
        if self._limit is not None:
            batch = batch.slice(0, self._limit - self.count)
        if self._output.json:
            grant = {} if grant_id is None else {"grant": grant_id}
            self._output.write(dumps({**message, **grant}) for message in values.messages(batch))
        else:
            self._output.write(values.lines(batch, self._coloured))
        self.count += batch.num_rows
        return int(batch.num_rows)
