"""Writes what a reader of whole epochs is given: messages, and what is said of the frontiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.cli.output import Output
from sublet.cli.printer import Printer

if TYPE_CHECKING:
    from protocol.epochs import Epoch
    from storage.epoch_tail import Message


class EpochPrinter:
    """Messages go to the `printer`, which counts them. `count`: how much was written, frontiers and all."""

    def __init__(self, output: Output, printer: Printer) -> None:
        self._output, self._printer = output, printer
        self.count = 0

    def show(self, message: Message) -> bool:
        """Write it; whether there is room for more. It is out of this process when it returns."""
        from storage.epoch_tail import Data, Snapshot

        self.count += 1
        if isinstance(message, Data):
            self._printer.show(message.table)
        elif isinstance(message, Snapshot):
            lower = None if message.lower is None else message.lower.least
            upper = message.upper.greatest
            told = {"lower": lower, "upper": upper}
            self._say({"snapshot": told}, f"snapshot\tfrom {_listed(lower)}\tbegun {_listed(upper) or '-'}")
        else:
            self._say({"lower": message.least}, f"completed\tbefore {_listed(message.least)}")
        return not self._printer.full

    def _say(self, thing: object, text: str) -> None:
        if self._output.json:
            self._output.emit(thing)
        else:
            self._output.write([text])


def _listed(epochs: tuple[Epoch, ...] | None) -> str:
    """As a publisher gives them: 7, or (1, 2). None: no epoch was used yet, and any may come."""
    if epochs is None:
        return "any"
    return " ".join(str(epoch[0]) if len(epoch) == 1 else str(epoch) for epoch in epochs)
