"""Histories of publishers in epochs, and readers that join them at any point: the world that `CompleteEpochFilter` is
judged in.

A world is drawn choice by choice, from dice or from hypothesis. After each step it remembers what one statement would
show: the head and the greatest epochs of every stream, the lower frontier of every space. A reader joins after some
step, looks at some of the later ones, and reads each stream up to the head that it saw, or beyond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier, is_at_or_before
from sublet_storage.log.complete_epoch_filter import CompleteEpochFilter, EpochStartingPosition

Choose = Callable[[int], int]
"""A number below the one that is given."""

STEPS = 12
SPACES = (0, 0, 0, 1)
"""Of each stream."""


@dataclass(frozen=True, slots=True)
class View:
    """What a single statement shows."""

    heads: tuple[int, ...]
    begun: tuple[UpperFrontier, ...]
    lowers: dict[int, LowerFrontier | None]


@dataclass
class World:
    """Streams of two spaces, publishers that hold capabilities, and all views since the beginning."""

    choose: Choose
    dimensions: int
    logs: tuple[list[Epoch], ...] = field(default_factory=lambda: tuple([] for _ in SPACES))
    views: list[View] = field(default_factory=list)
    _held: dict[int, list[Epoch]] = field(default_factory=lambda: {0: [], 1: []})
    _lowers: dict[int, LowerFrontier | None] = field(default_factory=lambda: {0: None, 1: None})

    def __post_init__(self) -> None:
        for space in range(2 if self.choose(4) else 1):
            self._begin(space)
        self._note()
        for _ in range(STEPS):
            self._step()
            self._note()

    @cached_property
    def by_epoch(self) -> dict[tuple[int, Epoch], set[int]]:
        """Return {(space, epoch): its messages}."""
        had = defaultdict(set)
        for stream, log in enumerate(self.logs):
            for offset, epoch in enumerate(log):
                had[SPACES[stream], epoch].add(offset * len(SPACES) + stream)
        return had

    def _step(self) -> None:
        space = SPACES[self.choose(len(SPACES))]
        held = self._held[space]
        act = self.choose(8)
        if not held or act == 7:
            self._begin(space)
        elif act == 6:
            held.pop(self.choose(len(held)))
            self._settle(space)
        elif act >= 4:
            place = self.choose(len(held))
            held[place] = self._later(held[place])
            self._settle(space)
        else:
            stream = self.choose(len(SPACES))
            held = self._held[SPACES[stream]]
            if held:
                self.logs[stream].append(self._later(held[self.choose(len(held))]))

    def _begin(self, space: int) -> None:
        lower = self._lowers[space]
        bottom = (0,) * self.dimensions
        least = (bottom,) if lower is None else lower.least
        self._held[space].append(self._later(least[self.choose(len(least))]))
        self._settle(space)

    def _later(self, epoch: Epoch) -> Epoch:
        """Return an epoch at or after this one, in every direction."""
        return tuple(number + max(0, self.choose(4) - 1) for number in epoch)

    def _settle(self, space: int) -> None:
        held, lower = self._held[space], self._lowers[space]
        if held:
            self._lowers[space] = LowerFrontier.from_epochs(held)
        elif lower is not None:
            self._lowers[space] = lower.after_completing(
                UpperFrontier.from_epochs(e for e, s in self._published() if s == space)
            )

    def _published(self) -> list[tuple[Epoch, int]]:
        return [(epoch, space) for log, space in zip(self.logs, SPACES, strict=True) for epoch in log]

    def _note(self) -> None:
        before = self.views[-1] if self.views else View((0,) * len(SPACES), (UpperFrontier(),) * len(SPACES), {})
        begun = list(before.begun)
        for stream, log in enumerate(self.logs):
            if len(log) > before.heads[stream]:
                begun[stream] = begun[stream].join(UpperFrontier((log[-1],)))
        self.views.append(View(tuple(map(len, self.logs)), tuple(begun), dict(self._lowers)))


@dataclass(slots=True)
class Reader:
    """One that joins after a step, and what it was given."""

    world: World
    joined: int
    begin: EpochStartingPosition
    selection: CompleteEpochFilter = field(init=False)
    given: list[list[int]] = field(default_factory=lambda: [[] for _ in SPACES])
    _position: list[int] = field(init=False)

    def __post_init__(self) -> None:
        view = self.world.views[self.joined]
        self.selection = CompleteEpochFilter.starting_at(self.begin, view.lowers, view.begun)
        self._position = list(view.heads) if self.begin is EpochStartingPosition.LATEST else [0] * len(SPACES)

    def read_all(self) -> Reader:
        """Look now and then until the history ends."""
        at, last = self.joined, len(self.world.views) - 1
        while True:
            self._round(at, min(last, at + self.world.choose(3)))
            if at == last:
                return self
            at = min(last, at + 1 + self.world.choose(6))

    def _round(self, seen: int, reached: int) -> None:
        """Streams are read up to the heads that were seen, or further; then the frontiers of that look are reported."""
        look = self.world.views[seen]
        for stream, space in enumerate(SPACES):
            head = self.world.views[seen if look.lowers[space] is None else reached].heads[stream]
            excluded = self.selection.excluded_in(space)
            for offset in range(self._position[stream], head):
                epoch = self.world.logs[stream][offset]
                if excluded is None or not excluded.contains(epoch):
                    self._give(stream, offset, epoch)
            self._position[stream] = max(self._position[stream], head)
        before = self.selection.announced
        self.selection = self.selection.advanced_to(look.lowers)
        reported = self.selection.announced
        assert before is None or (reported is not None and before.is_at_or_before(reported)), "it has gone back"

    def _give(self, stream: int, offset: int, epoch: Epoch) -> None:
        reported = self.selection.announced
        assert reported is None or reported.admits(epoch), f"{epoch} was reported as completed"
        self.given[stream].append(offset)

    def check(self) -> tuple[int, int]:
        """Every epoch was given whole or not at all, and those that should be; how many were, and were not."""
        had, given = self._by_epoch()
        for key, offsets in had.items():
            assert given.get(key, offsets) == offsets, f"{key} is torn: {given[key]} of {offsets}"
        late = {space for space, lower in self.world.views[self.joined].lowers.items() if lower is None}
        for space, epoch in had:
            if space not in late:
                assert ((space, epoch) in given) == self._due(epoch), f"{epoch} of space {space}"
        return len(given), len(had) - len(given)

    def _by_epoch(self) -> tuple[dict[tuple[int, Epoch], set[int]], dict[tuple[int, Epoch], set[int]]]:
        """Return {(space, epoch): its messages} of all messages, and of the delivered ones."""
        given = defaultdict(set)
        for stream, log in enumerate(self.world.logs):
            for offset in self.given[stream]:
                given[SPACES[stream], log[offset]].add(offset * len(SPACES) + stream)
        return self.world.by_epoch, given

    def _due(self, epoch: Epoch) -> bool:
        """Return whether the epoch is due by the definitions, from the messages and the frontiers at the time of
        joining."""
        if self.begin is EpochStartingPosition.EARLIEST:
            return True
        view = self.world.views[self.joined]
        least = [each for lower in view.lowers.values() if lower is not None for each in lower.least]
        if not any(is_at_or_before(each, epoch) for each in least):
            return False
        if self.begin is EpochStartingPosition.ACTIVE:
            return True
        there = {e for log, head in zip(self.world.logs, view.heads, strict=True) for e in log[:head]}
        return not any(is_at_or_before(epoch, e) for e in there if any(is_at_or_before(each, e) for each in least))
