"""Which epochs a reader is given, so that each comes whole or not at all: decided from frontiers alone, without I/O.

It begins with the frontiers of one instant. Afterwards, whenever all that lay below the heads of an instant has been
given, the frontiers of that instant are told, and what they have passed need not be filtered any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from sublet_protocol.domain.epochs import Epoch, LowerFrontier, UpperFrontier
from sublet_protocol.domain.errors import InvalidEpoch

Lowers = Mapping[int, LowerFrontier | None]
"""The lower frontier of each space from which something may come; None where no epoch was ever used: of such, only
what lies below the heads of the same instant may be given before these frontiers are told."""


class Begin(StrEnum):
    """Which epochs a reader wants that joins now."""

    LATEST = "latest"  # those that begin after it has come
    ACTIVE = "active"  # those that are not completed, from their beginnings, and all that come
    EARLIEST = "earliest"  # all of which nothing was taken by retention


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Epochs of which nothing is given: those at or before one of `covered`, and those not at or after `least`
    (None: of these there are none)."""

    covered: UpperFrontier
    least: LowerFrontier | None

    def has(self, epoch: Epoch) -> bool:
        """Whether the epoch is left out."""
        return self.covered.covers(epoch) or (self.least is not None and not self.least.may_come(epoch))

    def as_json(self) -> dict[str, str | None]:
        """Both as the database's functions take them."""
        least = None if self.least is None else json.dumps(self.least.least)
        return {"covered": json.dumps(self.covered.greatest), "least": least}


@dataclass(frozen=True, slots=True)
class Selection:
    """What a reader is given from here on.

    `told`: the last lower frontier that it was given; None: any epoch may come. `covered`: of these, part was there
    before it came, or is gone. `passed`: the spaces whose own frontier has come to `told`, with all that lay before
    that; from others there may be messages of epochs that were told to be completed, and these come too late.
    `apart`: what is left out of history of spaces from which nothing more comes, whose epochs are not compared.
    """

    told: LowerFrontier | None
    covered: UpperFrontier
    passed: frozenset[int] = frozenset()
    apart: Mapping[int, LeftOut] = field(default_factory=dict)

    @classmethod
    def at(
        cls,
        begin: Begin,
        lowers: Lowers,
        begun: Iterable[UpperFrontier],
        gone: Iterable[UpperFrontier] = (),
        apart: Mapping[int, LeftOut] | None = None,
    ) -> Selection:
        """Of a reader that joins. `begun`: of every matching stream of these spaces; `gone`: of those that retention
        has taken; `apart`: other spaces, of which there is only history.

        Raises `InvalidEpoch` where epochs cannot be compared.
        """
        begun, gone = list(begun), list(gone)
        check_alike(_epochs(lowers, *begun, *gone))
        upper, taken = UpperFrontier().join(*begun), UpperFrontier().join(*gone)
        lower = _least(lowers)
        if begin is Begin.EARLIEST:
            return cls(None, taken, apart=apart or {})
        if begin is Begin.ACTIVE:
            return cls(lower, active(taken, lower), apart=apart or {})
        return cls(lower, active(upper, lower), _passed(lowers, lower))

    def left_out(self, space_id: int) -> LeftOut | None:
        """What is left out of a space's streams; None: nothing."""
        if space_id in self.apart:
            return self.apart[space_id]
        least = None if space_id in self.passed else self.told
        return LeftOut(self.covered, least) if self.covered.greatest or least is not None else None

    def after(self, lowers: Lowers) -> Selection:
        """When all has been given that was there at an instant, whose frontiers these are. `told` never goes back."""
        check_alike([*_epochs(lowers, self.covered), *(self.told.least if self.told is not None else ())])
        told = _least(lowers)
        if told is None or self.told is None:
            told = told or self.told
        elif told != self.told:
            told = told.within(self.told)
        return Selection(told, active(self.covered, told), _passed(lowers, told))

    def wants(self, space_id: int, begun: UpperFrontier) -> bool:
        """Whether a stream of the space with these epochs may have had messages to be given that were not given yet."""
        left_out = self.apart.get(space_id) or LeftOut(self.covered, self.told)
        return not all(map(left_out.has, begun.greatest))


def active(begun: UpperFrontier, lower: LowerFrontier | None) -> UpperFrontier:
    """The greatest epochs that have begun and are not completed."""
    return begun if lower is None else begun.without(lower)


def check_alike(epochs: Iterable[Epoch]) -> None:
    """Raise `InvalidEpoch` if some have more numbers than others."""
    numbers = sorted(set(map(len, epochs)))
    if len(numbers) > 1:
        raise InvalidEpoch(
            f"epochs of {' and of '.join(map(str, numbers))} numbers are among what the filter matches, and cannot be "
            "compared. Read each space by a filter of its own."
        )


def without(batch: pa.RecordBatch, left_out: LeftOut) -> pa.RecordBatch:
    """The messages that are not in an epoch that is left out."""
    column = batch.column("epoch")
    if column.null_count == len(column):
        return batch
    epochs = [epoch and tuple(epoch) for epoch in column.to_pylist()]
    distinct = set(epochs) - {None}
    check_alike([*_epochs({0: left_out.least}, left_out.covered), *distinct])
    out = set(filter(left_out.has, distinct))
    return batch.filter(pa.array([epoch not in out for epoch in epochs])) if out else batch


def _epochs(lowers: Lowers, *uppers: UpperFrontier) -> list[Epoch]:
    least = [epoch for lower in lowers.values() if lower is not None for epoch in lower.least]
    return least + [epoch for upper in uppers for epoch in upper.greatest]


def _least(lowers: Lowers) -> LowerFrontier | None:
    found = [lower for lower in lowers.values() if lower is not None]
    return LowerFrontier().meet(*found) if found else None


def _passed(lowers: Lowers, told: LowerFrontier | None) -> frozenset[int]:
    return frozenset(
        space_id
        for space_id, lower in lowers.items()
        if lower is not None and (told is None or told.is_at_or_before(lower))
    )
