"""The groups of a run: their subscriptions and options, how they are declared and deleted."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.model.records import Group, GroupOptions, OnDataLoss

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

EXPIRY_S = 12.0
"""How long a group that waits for named sessions reserves their streams."""
_NAMES = ("$share/sim/#", "$share/second/#", "$queue/third/#")


@dataclass(slots=True)
class DeclaredGroup:
    """A subscription of the run and the options of its next group."""

    subscription: Subscription
    options: GroupOptions


class Groups:
    """One group in most runs, seldom three. Each is declared with options of its own, or created by its first
    subscriber. About one in three is atomic."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._world = simulation, simulation.world
        self._whims = Random(f"the groups of {simulation.seed}")
        self._starts = Random(f"where the groups of {simulation.seed} begin")
        count = self._world.random.choice((1, 1, 1, 1, 1, 2, 2, 3))
        self._wanted = {s: DeclaredGroup(s, self._options()) for s in map(Subscription.parse, _NAMES[:count])}
        self.retired: set[Subscription] = set()
        """Those that have been deleted at least once."""

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        return tuple(self._wanted)

    def start_of(self, subscription: Subscription) -> StartingPosition:
        """Return the starting position that subscribers request, which counts if the group is not declared."""
        return self._wanted[subscription].options.starting_position

    def live(self, subscription: Subscription) -> Group | None:
        """Return its present group; None if there is none."""
        return next((g for g in self._simulation.checkers.live_groups() if g.subscription == subscription), None)

    def declare(self, subscription: Subscription) -> None:
        """Declare the group with its options, unless it exists."""
        if self.live(subscription) is None:
            group = self._simulation.store.declare_group(subscription, self._wanted[subscription].options)
            self._world.say("operator", f"declares {group}")

    def begin(self) -> None:
        """Declare most groups before any member joins."""
        for subscription in self._wanted:
            if subscription.kind == "queue" or self._world.chance(0.8):
                self.declare(subscription)

    def delete(self, subscription: Subscription) -> None:
        """Delete the group as an operator, and mostly declare it anew at once, with other options."""
        group_id = self._simulation.store.delete_group(subscription)
        self._world.say("operator", f"deletes {subscription}, group {group_id}")
        if group_id is None:
            return
        self.retired.add(subscription)
        self._wanted[subscription].options = self._options()
        delay_s = self._world.random.choice((0.0, 0.0, self._world.random.uniform(0.0, 15.0)))
        if subscription.kind == "queue" or self._world.chance(0.7):
            self._world.after(delay_s, lambda: self.declare(subscription))

    def move(self, group: Group, delay_s: float) -> None:
        """Export the group as an operator, delete it, and create it from the export, at once or later."""
        subscription, options = group.subscription, group.options
        progress = self._simulation.store.export(group.group_id)
        self._simulation.store.delete_group(subscription)
        self._world.say("operator", f"deletes {subscription}, to import {progress}")
        self.retired.add(subscription)
        self._wanted[subscription].options = options

        def begin() -> None:
            if self._simulation.store.has_lost(group, progress):
                self.declare(subscription)
            elif self.live(subscription) is None:
                begun = self._simulation.store.begin_with(group, progress)
                self._world.say("operator", f"imports {begun}")

        self._world.after(delay_s, begin)

    def _options(self) -> GroupOptions:
        rnd = self._world.random
        start = rnd.choice((StartingPosition.EARLIEST, StartingPosition.EARLIEST, StartingPosition.LATEST))
        atomic = self._whims.random() < 1 / 3
        if atomic and self._whims.random() < 0.4:
            start = StartingPosition.LATEST
        start = self._another_start(start)
        on_data_loss = rnd.choice((OnDataLoss.FAIL, OnDataLoss.SKIP))
        return GroupOptions(
            starting_position=start,
            on_data_loss=OnDataLoss.FAIL if atomic else on_data_loss,
            strategy=rnd.choice(("even", "even", "load")),
            session_expiry_s=rnd.choice((0.0, EXPIRY_S)),
            atomic=atomic,
        )

    def _another_start(self, start: StartingPosition) -> StartingPosition:
        """Return the position, or for some groups a time or an offset."""
        kind, since_s = self._starts.random(), self._starts.uniform(0.0, self._simulation.publishing.past_s + 20.0)
        since_s += self._starts.choice((0.0, self._world.hours_s))
        if kind < 0.2:
            return StartingPosition("time", max(self._world.wall_us() - round(since_s * 1_000_000), 0))
        return StartingPosition("offset", self._starts.randint(0, 20)) if kind < 0.27 else start
