"""A gap in what one publisher says on one channel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Gap:
    """What is missing between messages that were seen, and until when it is waited for.

    A piece (after, until) stands for a chain of messages: the first has the predecessor `after`, the last the number
    `until`. No pieces: nothing is missing any more, or it was given up.
    """

    channel: str
    deadline: float
    pieces: list[tuple[int, int]]

    def fill(self, predecessor: int, sequence: int) -> bool:
        """Take in a message that came late; False if it was not missing here."""
        for index, (after, until) in enumerate(self.pieces):
            if after <= predecessor and sequence <= until:
                rest = [(after, predecessor), (sequence, until)]
                self.pieces[index : index + 1] = [piece for piece in rest if piece[0] < piece[1]]
                return True
        return False
