"""Epochs and their frontiers (Strymon's): what may still come, and what has begun.

An epoch is a tuple of integers in product order: one is at or before another if each of its numbers is. With one number
that is the order of the integers, with more some epochs are neither before nor after each other. All epochs of one
space have the same number of them.

A *lower frontier* is the antichain of the least epochs that may still be published: an epoch is *completed* once none
of them is at or before it. An *upper frontier* is the antichain of the greatest that have begun: an epoch that is not
at or before one of these begins later.
"""

from __future__ import annotations

import json
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from sublet_protocol.domain.bounded_cache import BoundedCache
from sublet_protocol.domain.errors import InvalidEpoch, MalformedRow
from sublet_protocol.domain.limits import MAX_ANTICHAIN, MAX_DIMENSIONS, MAX_EPOCH, MIN_EPOCH, to_integer

Epoch = tuple[int, ...]

StoredOffset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_StoredEpoch = Annotated[
    tuple[Annotated[int, Meta(ge=MIN_EPOCH, le=MAX_EPOCH + 1)], ...], Meta(min_length=1, max_length=MAX_DIMENSIONS)
]
_StoredEpochs = Annotated[tuple[_StoredEpoch, ...], Meta(max_length=MAX_ANTICHAIN)]

_T = TypeVar("_T")

_MAX_SHOWN = 20
"""Most epochs of a frontier in a text for people."""

_MAX_COMPARISONS = 2_000_000
"""Of epochs with each other, where some are completed: what takes more is not computed exactly."""

_MAX_COMPARED = 20_000
"""Most epochs of more than two numbers of which the least are found: 0.2 s."""

_PART = 512
"""Epochs that are compared at a time: with as many bits each, a megabyte where a frontier has most."""


def check_epoch(value: object, numbers: int | None = None) -> Epoch:
    """Return the epoch that a caller means with an int, or a sequence of ints. `numbers`: how many the space's epochs
    have.

    Raise `InvalidEpoch`.
    """
    sequence: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
    parts = [number for part in sequence if (number := to_integer(part)) is not None]
    if len(parts) < len(sequence):
        raise _epoch_error(value, "an epoch is an integer, or a tuple of integers", "Give one")
    if not 1 <= len(parts) <= MAX_DIMENSIONS:
        raise _epoch_error(value, f"an epoch has 1 to {MAX_DIMENSIONS} numbers", "Leave some out, or put some together")
    if not all(MIN_EPOCH <= part <= MAX_EPOCH for part in parts):
        raise _epoch_error(value, f"each number of an epoch is a 64-bit integer, at most {MAX_EPOCH}", "Take others")
    if numbers is not None and len(parts) != numbers:
        rule = f"the epochs of this space have {numbers} number{'s' * (numbers != 1)}, and this one has {len(parts)}"
        raise _epoch_error(value, rule, "Use epochs of one kind in a space, or another space")
    return tuple(parts)


def check_count(epochs: Sequence[Epoch]) -> None:
    """Raise `InvalidEpoch` for more epochs than a frontier may have."""
    if len(epochs) > MAX_ANTICHAIN:
        rule = f"{len(epochs)} epochs at a time, and the limit is {MAX_ANTICHAIN}"
        raise InvalidEpoch(f"{rule}. Name fewer: what is at or after one of them may be published too.")


def is_at_or_before(left: Epoch, right: Epoch) -> bool:
    """Return whether `left` is at or before `right` in product order, which is not the order in which Python sorts
    tuples.
    """
    if len(left) == 1 == len(right):
        return left[0] <= right[0]
    return all(map(operator.le, left, right)) if len(left) == len(right) else _refuse_dimensions(left, right)


def _find_least(epochs: Iterable[Epoch], enough: float = math.inf) -> list[Epoch]:
    """Return the least of the epochs, which are distinct, sorted; or once there are more than `enough`, not all."""
    antichain: list[Epoch] = []
    ascending = sorted(epochs)  # what is at or before another comes before it in this order, too
    if ascending and len(ascending[0]) <= 2:
        for epoch in ascending:  # of two numbers the last has the least second one
            if not (antichain and is_at_or_before(antichain[-1], epoch)):
                antichain.append(epoch)
        return antichain
    for start in range(0, len(ascending), _PART):
        part = ascending[start : start + _PART]
        earlier = _find_earlier(part, [*antichain, *part])
        itself = 1 << len(antichain)
        antichain += [epoch for nth, epoch in enumerate(part) if earlier[nth] == itself << nth]
        if len(antichain) > enough:
            break
    return antichain


def _find_earlier(epochs: Sequence[Epoch], others: Sequence[Epoch]) -> list[int]:
    """Return for each epoch which of the others are at or before it: bit n for the nth."""
    if len({len(epoch) for each in (epochs, others) for epoch in each}) > 1:
        _refuse_dimensions(min(*epochs, *others, key=len), max(*epochs, *others, key=len))
    earlier = [-1] * len(epochs)
    for dimension in range(len(epochs[0]) if epochs else 0):
        ascending = sorted((other[dimension], 1 << nth) for nth, other in enumerate(others))
        numbers = [number for number, _ in ascending]
        up_to = list(accumulate((bit for _, bit in ascending), operator.or_, initial=0))
        for nth, epoch in enumerate(epochs):
            earlier[nth] &= up_to[bisect_right(numbers, epoch[dimension])]
    return earlier


def _refuse_dimensions(left: Epoch, right: Epoch) -> bool:
    raise ValueError(f"epochs {left} and {right}: they have not as many dimensions")


class LowerFrontier(Struct, frozen=True):
    """The least epochs that may still be published, with anything at or after one of them. None of them is at or before
    another, and they are sorted; empty: nothing may be published, all is completed.
    """

    least: tuple[Epoch, ...] = ()

    @classmethod
    def from_epochs(cls, epochs: Iterable[Epoch]) -> LowerFrontier:
        """Return the frontier of all that may still be published at or after any of these."""
        epoch_set = set(epochs)
        if len(epoch_set) == 1:
            return cls(tuple(epoch_set))
        return cls(tuple(_find_least(epoch_set)))

    def admits(self, epoch: Epoch) -> bool:
        """Return whether messages of the epoch may still be published."""
        for least_epoch in self.least:  # noqa: SIM110 - a reader asks this of each block, and so it is quicker
            if is_at_or_before(least_epoch, epoch):
                return True
        return False

    def find_admitted(self, epochs: Sequence[Epoch]) -> list[Epoch]:
        """Return the epochs of which messages may still be published."""
        if min(len(self.least), len(epochs)) <= 4:
            return [epoch for epoch in epochs if self.admits(epoch)]
        return [epoch for epoch, earlier in zip(epochs, _find_earlier(epochs, self.least), strict=True) if earlier]

    def after_completing(self, begun: UpperFrontier) -> LowerFrontier:
        """Return what is left when all that has begun is completed: the least epochs that may come and have not
        begun. Where these are more than a frontier may have, or take too long to find, return those of them that lie
        above the greatest of all numbers and after the first epoch of this frontier: more is completed then.
        """
        antichain, comparisons = list(self.least), _MAX_COMPARISONS
        for greatest in begun.remove_completed(self).greatest:
            beside = LowerFrontier(tuple(epoch for epoch in antichain if not is_at_or_before(epoch, greatest)))
            above = {
                each
                for epoch in antichain
                if is_at_or_before(epoch, greatest)
                for each in _find_least_beyond(epoch, greatest)
            }
            comparisons -= len(above) * (len(above) + len(beside.least))
            if comparisons >= 0:  # none of the others is after one above, as those were beside it
                least_above = LowerFrontier.from_epochs(above).least
                antichain = [*beside.least, *set(least_above).difference(beside.find_admitted(least_above))]
            if comparisons < 0 or len(antichain) > MAX_ANTICHAIN:
                return LowerFrontier(self.least[:1]).after_completing(UpperFrontier((_find_bound(begun.greatest),)))
        return LowerFrontier(tuple(sorted(antichain)))

    def is_at_or_before(self, other: LowerFrontier) -> bool:
        """Return whether one could become the other in time: all that may still come there may still come here."""
        return len(self.find_admitted(other.least)) == len(other.least)

    def meet(self, *others: LowerFrontier) -> LowerFrontier:
        """Merge frontiers of several streams, or of several publishers: what may come from any of them."""
        return LowerFrontier.from_epochs(epoch for each in (self, *others) for epoch in each.least)

    def meet_within_limits(self, others: Iterable[LowerFrontier]) -> LowerFrontier | None:
        """Return the same as `meet`; None where it had more epochs than a frontier may have, or takes too long to find,
        as of epochs that are made up."""
        epoch_set = {epoch for each in (self, *others) for epoch in each.least}
        if len(epoch_set) > _MAX_COMPARED and len(next(iter(epoch_set))) > 2:
            return None
        antichain = _find_least(epoch_set, MAX_ANTICHAIN)
        return LowerFrontier(tuple(antichain)) if len(antichain) <= MAX_ANTICHAIN else None

    def intersect(self, other: LowerFrontier) -> LowerFrontier:
        """Return what may come according to both. Of two frontiers too large to combine, return the later one or else
        this one, which also includes what may come according to both.
        """
        if self == other:
            return self
        if len(self.least) * len(other.least) > MAX_ANTICHAIN:
            return other if self.is_at_or_before(other) else self
        return LowerFrontier.from_epochs(tuple(map(max, left, right)) for left in self.least for right in other.least)


class UpperFrontier(Struct, frozen=True):
    """The greatest epochs that have begun, with anything at or before one of them. None of them is at or before
    another, and they are sorted; empty: nothing has begun, or all that had is completed.
    """

    greatest: tuple[Epoch, ...] = ()

    @classmethod
    def from_epochs(cls, epochs: Iterable[Epoch]) -> UpperFrontier:
        """Return the frontier of all these. Where it had more epochs than a frontier may have, or takes too long to
        find, return the one epoch that all of them are at or before: what lies between counts as begun.
        """
        epoch_set = set(epochs)
        if len(epoch_set) <= 1:
            return cls(tuple(epoch_set))
        if len(epoch_set) <= _MAX_COMPARED or len(next(iter(epoch_set))) <= 2:
            greatest = [_negate(epoch) for epoch in _find_least(map(_negate, epoch_set), MAX_ANTICHAIN)]
            if len(greatest) <= MAX_ANTICHAIN:
                return cls(tuple(reversed(greatest)))
        return cls((_find_bound(epoch_set),))

    def covers(self, epoch: Epoch) -> bool:
        """Return whether messages of the epoch may have come already."""
        return any(is_at_or_before(epoch, greatest) for greatest in self.greatest)

    def find_covered(self, epochs: Sequence[Epoch]) -> list[Epoch]:
        """Return the epochs of which messages may have come already."""
        admitted = LowerFrontier(tuple(map(_negate, self.greatest))).find_admitted([_negate(each) for each in epochs])
        return [_negate(each) for each in admitted]

    def join(self, *others: UpperFrontier) -> UpperFrontier:
        """Merge frontiers of several streams: what has begun in any of them."""
        return UpperFrontier.from_epochs(epoch for each in (self, *others) for epoch in each.greatest)

    def remove_completed(self, completed: LowerFrontier) -> UpperFrontier:
        """Return it without the epochs that are completed.

        An epoch in the lower frontier itself may come: it stays until the frontier is strictly past it.
        """
        return UpperFrontier(tuple(completed.find_admitted(self.greatest)))


class ConsumedFrontier(Struct, frozen=True):
    """The messages of a stream consumed in entire epochs, in addition to all before its position.

    Of the messages before offset `upto` those in an epoch that `lower` no longer admits, and those in no epoch. `lower`
    is None where no epoch is consumed. Of two such frontiers of one stream, one is at or after the other.
    """

    upto: int
    lower: LowerFrontier | None = None

    def needs(self, epoch: Epoch) -> bool:
        """Return whether messages of the epoch are still to be consumed."""
        return self.lower is None or self.lower.admits(epoch)

    def max_of(self, other: ConsumedFrontier | None) -> ConsumedFrontier:
        """Return the later of the two; this one if the other's epochs have another number of dimensions."""
        if other is None or not have_same_dimensions(self.lower, other.lower):
            return self
        if self.lower is None or other.lower is None:
            return ConsumedFrontier(max(self.upto, other.upto), self.lower or other.lower)
        if self.upto != other.upto:
            return max(self, other, key=lambda frontier: frontier.upto)
        return self.advanced_to(self.upto, other.lower)

    def advanced_to(self, upto: int, completed: LowerFrontier | None) -> ConsumedFrontier:
        """Return the frontier when all is consumed that lies before `upto` and is completed."""
        if completed is None:
            return ConsumedFrontier(upto, self.lower)
        return ConsumedFrontier(upto, completed if self.lower is None else self.lower.intersect(completed))

    def to_json(self) -> dict[str, Any]:
        """Return the frontier as it is stored."""
        return {"upto": self.upto, "least": None if self.lower is None else self.lower.least}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ConsumedFrontier:
        """Return a stored frontier. Raise `MalformedRow`."""
        frontier = convert_stored(stored, _StoredConsumedFrontier, "a consumed frontier")
        return cls(frontier.upto, lower_frontier_from_json(frontier.least))


class _StoredConsumedFrontier(Struct):
    upto: StoredOffset
    least: _StoredEpochs | None


class GroupFrontier(Struct, frozen=True):
    """The progress of a group in one space: `consumed` by all of it, and what was completed (`lower`) at that time.

    A space that is made anew under the name of one that was dropped has another id.
    """

    space: str
    space_id: int
    consumed: LowerFrontier
    lower: LowerFrontier


def format_frontier(lower: LowerFrontier) -> str:
    """Return a frontier for people: the epoch, or each of them, of many the first."""
    shown = [format_epoch(epoch) for epoch in lower.least[:_MAX_SHOWN]]
    more = len(lower.least) - len(shown)
    return " or ".join(shown + [f"{more} more"] * (more > 0)) or "nothing"


def format_epoch(epoch: Epoch) -> str:
    """Return an epoch for people: a number, or numbers in parentheses."""
    return str(epoch[0]) if len(epoch) == 1 else str(epoch)


def lower_frontier_from_json(stored: Iterable[Iterable[int]] | None) -> LowerFrontier | None:
    """Return a frontier as it is stored; None for none. Raise `MalformedRow`."""
    return None if stored is None else LowerFrontier.from_epochs(_convert_epochs(stored))


def lower_frontier_from_text(stored: str | None) -> LowerFrontier | None:
    """Return the same of JSON as text. A frontier is read far more often than it moves, so it is not parsed each
    time."""
    return None if stored is None else _parsed_frontiers.get(stored)


_parsed_frontiers = BoundedCache(
    lambda stored: LowerFrontier.from_epochs(_convert_epochs(json.loads(stored))), max_entries=1024
)


def upper_frontier_from_json(stored: Iterable[Iterable[int]] | None) -> UpperFrontier:
    """Return a frontier as it is stored; empty for none. Raise `MalformedRow`."""
    return UpperFrontier.from_epochs(_convert_epochs(() if stored is None else stored))


def convert_stored(stored: Any, kind: type[_T], name: str) -> _T:
    """Return a stored value as that type. Raise `MalformedRow`."""
    try:
        return msgspec.convert(stored, kind)
    except msgspec.ValidationError as error:
        raise _malformed_error(stored, name, str(error)) from None


def _convert_epochs(stored: Any) -> Sequence[Epoch]:
    epochs = convert_stored(stored, _StoredEpochs, "a frontier")
    if len({len(epoch) for epoch in epochs}) > 1:
        raise _malformed_error(stored, "a frontier", "its epochs have not as many dimensions")
    return epochs


def _malformed_error(stored: Any, name: str, rule: str) -> MalformedRow:
    shown = repr(stored)[:80]
    return MalformedRow(f"{shown} is stored as {name}: {rule}. Who writes rows by SQL wrote it: write another value.")


def have_same_dimensions(left: LowerFrontier | None, right: LowerFrontier | None) -> bool:
    """Return whether their epochs have as many numbers."""
    return len({len(epoch) for each in (left, right) if each is not None for epoch in each.least}) <= 1


def _negate(epoch: Epoch) -> Epoch:
    return tuple(map(operator.neg, epoch))


def _find_bound(epochs: Iterable[Epoch]) -> Epoch:
    """Return the least epoch that all of these are at or before: of each number the greatest."""
    return tuple(map(max, zip(*epochs, strict=True)))


def _find_least_beyond(epoch: Epoch, greatest: Epoch) -> Iterable[Epoch]:
    """Return the least epochs at or after the one and not at or before the other, which it is at or before: in some
    number they lie above it."""
    return [
        (*epoch[:dimension], bound + 1, *epoch[dimension + 1 :])
        for dimension, bound in enumerate(greatest)
        if bound <= MAX_EPOCH
    ]


def _epoch_error(value: object, rule: str, hint: str) -> InvalidEpoch:
    shown = repr(value)
    return InvalidEpoch(f"epoch {shown if len(shown) <= 80 else shown[:77] + '...'}: {rule}. {hint}.")
