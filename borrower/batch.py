"""What a session gives its user: consecutive messages of one stream."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from borrower.handler import Lent


class Batch:
    """Messages of one stream at offsets in [first, end), those that match the filter.

    `table`: Arrow, columns topic, key, value, headers, timestamp, epoch, stream, offset. `grant_id` is the fencing
    token: it only grows per stream, and a larger one means that somebody else has the stream.
    """

    def __init__(
        self,
        table: pa.Table,
        first: int,
        end: int,
        lent: Lent,
        acknowledge: Callable[[Lent, int], None] | None,
        progressed: Callable[[Lent, int, int], None] | None = None,
    ) -> None:
        self.table, self.first, self.end = table, first, end
        self.stream_id, self.grant_id = lent.stream_id, lent.grant_id
        self._lent, self._acknowledge, self._progressed = lent, acknowledge, progressed

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __repr__(self) -> str:
        return f"Batch(stream {self.stream_id}, offsets [{self.first}, {self.end}), {len(self)} messages)"

    @property
    def positions(self) -> dict[int, tuple[int, int]]:
        """{stream: (first offset, offset after the last)}."""
        return {self.stream_id: (self.first, self.end)}

    @property
    def lost(self) -> bool:
        """True once the stream was taken away without our word: somebody else will see these messages again."""
        return self._lent.lost

    def ack(self, upto: int | None = None) -> None:
        """All of it is done. Asking for the next batch does this too, unless the session has auto_ack off.

        The stream's progress moves behind it once all batches before it are acknowledged as well. `upto`: only what
        lies before this offset is done, and the rest still to be worked on. Acknowledging a batch again has no effect.
        """
        if upto is not None and upto < self.end:
            if self._progressed is not None and self._acknowledge is not None and upto > self.first:
                self._progressed(self._lent, self.first, upto)
            return
        acknowledge, self._acknowledge = self._acknowledge, None
        if acknowledge is not None:
            acknowledge(self._lent, self.first)

    def part(self, start: int, count: int) -> Batch:
        """Rows [start, start + count) as a batch of their own; acknowledging it has no effect."""
        rows = self.table.slice(start, count)
        if rows.num_rows == 0:
            return Batch(rows, self.first, self.first, self._lent, None)
        offsets = rows.column("offset")
        return Batch(rows, offsets[0].as_py(), offsets[-1].as_py() + 1, self._lent, None)
