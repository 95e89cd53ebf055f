"""Prints messages and epochs for `tail` and `consume`, as text or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.cli.base import text_conversion
from sublet.cli.base.output import CliOutput, to_json_line

if TYPE_CHECKING:
    import pyarrow as pa

    from sublet_protocol.domain.epoch_frontiers import Epoch
    from sublet_storage.readers.complete_epoch_tail import EpochTailItem


class MessagePrinter:
    """Prints messages. `limit`: maximum number in all; None is no limit. `count`: number printed so far."""

    def __init__(self, output: CliOutput, limit: int | None) -> None:
        self._output, self._limit = output, limit
        self._coloured = output.is_coloured
        self.count = 0

    @property
    def is_full(self) -> bool:
        """Return whether the limit is reached."""
        return self._limit is not None and self.count >= self._limit

    def print_batch(self, batch: pa.RecordBatch | pa.Table, grant_id: int | None = None) -> int:
        """Write a batch up to the limit and flush; return the number of messages written."""
        if self._limit is not None:
            batch = batch.slice(0, self._limit - self.count)
        if self._output.json:
            grant = {} if grant_id is None else {"grant_id": grant_id}
            self._output.write_lines(
                to_json_line({**message, **grant}) for message in text_conversion.messages_to_json(batch)
            )
        else:
            self._output.write_lines(text_conversion.format_messages(batch, self._coloured))
        self.count += batch.num_rows
        return int(batch.num_rows)


class EpochPrinter:
    """Prints epochs; messages go to the `printer`, which counts them. `count`: items written, frontiers included."""

    def __init__(self, output: CliOutput, printer: MessagePrinter) -> None:
        self._output, self._printer = output, printer
        self.count = 0

    def print_item(self, message: EpochTailItem) -> bool:
        """Write and flush an item; return whether there is room for more."""
        from sublet_storage.readers.complete_epoch_tail import EpochTailMessages, FrontierSnapshot

        self.count += 1
        if isinstance(message, EpochTailMessages):
            self._printer.print_batch(message.table)
        elif isinstance(message, FrontierSnapshot):
            lower = None if message.lower is None else message.lower.least
            upper = message.upper.greatest
            snapshot = {"lower": lower, "upper": upper}
            self._print(
                {"snapshot": snapshot}, f"snapshot\tfrom {_format_epochs(lower)}\tbegun {_format_epochs(upper) or '-'}"
            )
        else:
            self._print({"lower": message.least}, f"completed\tbefore {_format_epochs(message.least)}")
        return not self._printer.is_full

    def _print(self, value: object, text: str) -> None:
        if self._output.json:
            self._output.print_json(value)
        else:
            self._output.write_lines([text])


def _format_epochs(epochs: tuple[Epoch, ...] | None) -> str:
    """Return epochs in a publisher's form: 7, or (1, 2). None: no epoch was used yet, and any may come."""
    if epochs is None:
        return "any"
    return " ".join(str(epoch[0]) if len(epoch) == 1 else str(epoch) for epoch in epochs)
