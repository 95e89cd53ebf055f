"""Selects the epochs that a reader gets entirely or not at all; no I/O.

It begins with the frontiers of one instant. Afterwards, whenever all that lay below the heads of an instant has been
delivered, the frontiers of that instant are announced, and what they have passed need not be filtered any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum

import pyarrow as pa
from msgspec import Struct, field

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_protocol.domain.errors import InvalidEpoch

LowerFrontiers = Mapping[int, LowerFrontier | None]
"""The lower frontier of each space from which something may come; None where no epoch was ever used: of such, only what
lies below the heads of the same instant may be delivered before these frontiers are announced."""


class EpochStartingPosition(StrEnum):
    """The starting position of a reader by epochs."""

    LATEST = "latest"  # those that begin after it has come
    ACTIVE = "active"  # those that are not completed, from their beginnings, and all that come
    EARLIEST = "earliest"  # all of which nothing was taken by retention


class ExcludedEpochs(Struct, frozen=True):
    """The epochs of which nothing is delivered: those at or before one of `covered`, those not at or after `least`
    (None: of these there are none), and of those at or before one of `begun` the ones that `lower` admits."""

    covered: UpperFrontier
    least: LowerFrontier | None
    begun: UpperFrontier = UpperFrontier()
    lower: LowerFrontier | None = None

    def contains(self, epoch: Epoch) -> bool:
        """Return whether the epoch is excluded."""
        is_unfinished = self.lower is not None and self.begun.covers(epoch) and self.lower.admits(epoch)
        return is_unfinished or self.covered.covers(epoch) or (self.least is not None and not self.least.admits(epoch))

    def to_json(self) -> dict[str, str | None]:
        """Return `covered` and `least` as the database's functions take them: by these it leaves out most blocks."""
        least = None if self.least is None else json.dumps(self.least.least)
        return {"covered": json.dumps(self.covered.greatest), "least": least}


class CompleteEpochFilter(Struct, frozen=True):
    """The selection of a reader from here on.

    `announced`: the last lower frontier that it was given; None: any epoch may come. `covered`: of these, part was
    there before it came, or is gone. `skipped_streams`: the spaces whose own frontier has come to `announced`, with all
    that lay before that; from others there may be messages of epochs that were announced as completed, and these come
    too late. `excluded_by_space`: what is excluded from the history of spaces that get no more messages, whose epochs
    are not compared. `covered_elsewhere`: the same as `covered`, of each space that had no open stream for the reader
    when it began and may have one again: of its epochs that had begun by then part may come later.
    """

    announced: LowerFrontier | None
    covered: UpperFrontier
    skipped_streams: frozenset[int] = frozenset()
    excluded_by_space: Mapping[int, ExcludedEpochs] = field(default_factory=dict)
    covered_elsewhere: Mapping[int, UpperFrontier] = field(default_factory=dict)

    @classmethod
    def starting_at(
        cls,
        begin: EpochStartingPosition,
        lowers: LowerFrontiers,
        begun: Iterable[UpperFrontier],
        gone: Iterable[UpperFrontier] = (),
        excluded_by_space: Mapping[int, ExcludedEpochs] | None = None,
        elsewhere: Mapping[int, UpperFrontier] | None = None,
    ) -> CompleteEpochFilter:
        """Return the selection of a new reader. `begun`: of every matching stream of these spaces; `gone`: of those
        that retention has taken; `excluded_by_space`: other spaces, which have only history; `elsewhere`: what has
        begun in these, or is gone, of which a later stream may have the rest.

        Raise `InvalidEpoch` if epochs cannot be compared.
        """
        begun, gone = list(begun), list(gone)
        check_same_dimensions(_list_epochs(lowers, *begun, *gone))
        upper, gone_frontier = UpperFrontier().join(*begun), UpperFrontier().join(*gone)
        lower, elsewhere = _meet_frontiers(lowers), elsewhere or {}
        if begin is EpochStartingPosition.EARLIEST:
            return cls(None, gone_frontier, excluded_by_space=excluded_by_space or {}, covered_elsewhere=elsewhere)
        if begin is EpochStartingPosition.ACTIVE:
            covered = active_epochs(gone_frontier, lower)
            return cls(lower, covered, excluded_by_space=excluded_by_space or {}, covered_elsewhere=elsewhere)
        return cls(lower, active_epochs(upper, lower), _find_passed(lowers, lower), covered_elsewhere=elsewhere)

    def excluded_in(self, space_id: int) -> ExcludedEpochs | None:
        """Return the epochs excluded from a space's streams; None: none."""
        if space_id in self.excluded_by_space:
            return self.excluded_by_space[space_id]
        least = None if space_id in self.skipped_streams else self.announced
        covered = self._find_covered(space_id)
        return ExcludedEpochs(covered, least) if covered.greatest or least is not None else None

    def advanced_to(self, lowers: LowerFrontiers) -> CompleteEpochFilter:
        """Return the selection once everything below the heads of an instant was delivered; `lowers`: the frontiers of
        that instant. `announced` never moves back."""
        check_same_dimensions(
            [*_list_epochs(lowers, self.covered), *(self.announced.least if self.announced is not None else ())]
        )
        announced = _meet_frontiers(lowers)
        if announced is None or self.announced is None:
            announced = announced or self.announced
        elif announced != self.announced:
            announced = self.announced.intersect(announced)
        elsewhere = {
            space_id: left
            for space_id, covered in self.covered_elsewhere.items()
            if (left := active_epochs(covered, lowers.get(space_id))).greatest
        }
        return CompleteEpochFilter(
            announced,
            active_epochs(self.covered, announced),
            _find_passed(lowers, announced),
            covered_elsewhere=elsewhere,
        )

    def may_need(self, space_id: int, begun: UpperFrontier) -> bool:
        """Return whether a stream of the space with these epochs may have messages that are yet to be delivered."""
        excluded = self.excluded_by_space.get(space_id) or ExcludedEpochs(self._find_covered(space_id), self.announced)
        # Without `begun`: that leaves out a stream's last epochs, but not those before them.
        excluded = ExcludedEpochs(excluded.covered, excluded.least)
        return not all(map(excluded.contains, begun.greatest))

    def _find_covered(self, space_id: int) -> UpperFrontier:
        elsewhere = self.covered_elsewhere.get(space_id)
        if elsewhere is None:
            return self.covered
        check_same_dimensions(_list_epochs({}, self.covered, elsewhere))
        return self.covered.join(elsewhere)


def active_epochs(begun: UpperFrontier, lower: LowerFrontier | None) -> UpperFrontier:
    """Return the greatest epochs that have begun and are not completed."""
    return begun if lower is None else begun.remove_completed(lower)


def check_same_dimensions(epochs: Iterable[Epoch]) -> None:
    """Raise `InvalidEpoch` if some have more numbers than others."""
    numbers = sorted(set(map(len, epochs)))
    if len(numbers) > 1:
        raise InvalidEpoch(
            f"epochs of {' and of '.join(map(str, numbers))} numbers are among what the filter matches, and cannot be "
            "compared. Read each space by a filter of its own."
        )


def drop_excluded(batch: pa.RecordBatch, excluded: ExcludedEpochs) -> pa.RecordBatch:
    """Return the messages that are not in an epoch that is left out."""
    column = batch.column("epoch")
    if column.null_count == len(column):
        return batch
    epochs = [epoch and tuple(epoch) for epoch in column.to_pylist()]
    distinct = set(epochs) - {None}
    check_same_dimensions([*_list_epochs({0: excluded.least}, excluded.covered), *distinct])
    out = set(filter(excluded.contains, distinct))
    return batch.filter(pa.array([epoch not in out for epoch in epochs])) if out else batch


def _list_epochs(lowers: LowerFrontiers, *uppers: UpperFrontier) -> list[Epoch]:
    epochs = [epoch for lower in lowers.values() if lower is not None for epoch in lower.least]
    return epochs + [epoch for upper in uppers for epoch in upper.greatest]


def _meet_frontiers(lowers: LowerFrontiers) -> LowerFrontier | None:
    frontiers = [lower for lower in lowers.values() if lower is not None]
    return LowerFrontier().meet(*frontiers) if frontiers else None


def _find_passed(lowers: LowerFrontiers, announced: LowerFrontier | None) -> frozenset[int]:
    return frozenset(
        space_id
        for space_id, lower in lowers.items()
        if lower is not None and (announced is None or announced.is_at_or_before(lower))
    )
