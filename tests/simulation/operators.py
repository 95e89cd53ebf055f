"""The groups of a run, and what operators do to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from sublet_leader.node.events import StreamsChanged
from sublet_protocol.domain.errors import Conflict, NotFound
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.desired_state import PauseGroup, ResumeGroup
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import Group, GroupOptions, LendingStatus, OnDataLoss
from tests.simulation.checkers.lives import Violation
from tests.simulation.world import BOTH_DIRECTIONS, Happenings

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

EXPIRY_S = 12.0
"""How long a group that waits for named sessions reserves their streams."""
_NAMES = ("$share/sim/#", "$share/second/#", "$queue/third/#")
_POLL_INTERVAL_S = 0.2
_MAX_AGENTS = 6
_KINDS = ("pause", "reset", "reset", "reset", "one", "one", "import", "silence", "silence", "twin", "retire", "anew")
_TARGETS = ("earliest", "latest", "current", "shift", "offset", "time")
_ATOMIC = ("earliest", "latest", "offset", "time")


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


class Operators(Happenings):
    """Pause, resume, reset, export and import groups at work, and revoke by force, in a part of all runs. A live reset
    is implemented here as the command does it: pause, wait until nothing is held, reset, resume. What it does to the
    rows is the product's own rule."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the operators")
        self._store = simulation.store
        self._paused: set[int] = set()
        self._resetting: set[int] = set()
        self.resets = 0

    def begin(self, until: float) -> None:
        self._until = until
        if self._random.random() < 0.5:
            self._kinds = [kind for kind in _KINDS if self._random.random() < 0.7] or ["reset"]
            self._repeat(self._befall, 9.0)

    def mend(self) -> None:
        """Resume paused groups, and reset blocked streams to where they can continue."""
        for group in self._simulation.checkers.live_groups():
            if group.group_id in self._paused:
                self._resume(group)
        self._unblock()

    def _befall(self) -> None:
        group = self._simulation.groups.live(self._random.choice(self._simulation.groups.subscriptions))
        if group is not None:
            self._act(group)

    def _act(self, group: Group) -> None:
        match self._random.choice(self._kinds):
            case "pause":
                self._pause(group)
            case "reset":
                self.reset(group, self._random.choice(_ATOMIC if group.options.atomic else _TARGETS))
            case "one" if not group.options.atomic:
                self._reset_one(group)
            case "import" if not self._simulation.lowered_heads.concerns(group.group_id):
                self._simulation.groups.move(group, self._random.choice((0.0, 0.0, self._random.uniform(0.0, 10.0))))
            case "silence":
                self._revoke_in_silence(group)
            case "twin":
                self._start_twin()
            case "retire":
                self._retire()
            case "anew":
                self._make_anew(group)

    # --- pauses -----------------------------------------------------------------------------------------------------

    def _pause(self, group: Group) -> None:
        self._say(f"pauses {group.subscription}")
        self._store.apply_command(group.subscription, PauseGroup("for a while"))
        self._paused.add(group.group_id)
        self._notify(group)
        self._world.after(self._random.uniform(0.5, 15.0), lambda: self._resume(group))

    def _resume(self, group: Group) -> None:
        self._paused.discard(group.group_id)
        if self._store.find_group(group.group_id) is not None and group.group_id not in self._resetting:
            self._say(f"resumes {group.subscription}")
            self._store.apply_command(group.subscription, ResumeGroup())
            self._notify(group)

    def _notify(self, group: Group) -> None:
        for node in self._simulation.nodes:
            if self._random.random() < 0.7:
                later_s = self._random.uniform(0.0, 0.3)
                self._world.after(later_s, partial(node.deliver, StreamsChanged(group_id=group.group_id)))

    # --- resets -----------------------------------------------------------------------------------------------------

    def _reset_one(self, group: Group) -> None:
        """Reset one stream, also a blocked one; or one that was consumed long ago."""
        rows = self._store.rows(group.group_id)
        closed = [s for s in sorted(rows) if self._streams.streams[s].closed]
        consumed = [s for s in closed if rows[s].status is LendingStatus.FINISHED]
        if consumed and self._random.random() < 0.5:
            self.reset(group, "earliest", (self._random.choice(consumed),))
        elif rows:
            self.reset(group, self._random.choice(_TARGETS), (self._random.choice(sorted(rows)),))

    def _unblock(self) -> None:
        """Reset streams that are blocked because retention deleted unread messages."""
        for group in self._simulation.checkers.live_groups():
            rows = self._store.rows(group.group_id).values()
            blocked = tuple(row.stream_id for row in rows if row.status is LendingStatus.BLOCKED)
            if blocked and group.options.atomic:
                self.reset(group, "earliest")
            elif blocked:
                self.reset(group, "latest", blocked)

    def reset(self, group: Group, target: str, streams: tuple[int, ...] = ()) -> None:
        """Pause the group if it is not, wait, reset it, and resume it if it was paused for that."""
        if group.group_id in self._resetting:
            return
        self._resetting.add(group.group_id)
        drain_timeout_s, force = self._random.choice((2.0, 10.0, 30.0)), self._random.random() < 0.25
        value = self._value_of(target)
        self._say(f"resets {group.subscription} to {target} {value}, {streams or 'all'}, {force=}")
        if group.group_id not in self._paused:
            self._store.apply_command(group.subscription, PauseGroup("to be reset"))
            self._notify(group)

        def carry_out() -> None:
            if self._store.find_group(group.group_id) is not None:
                self._carry_out(group, ResetTarget(target, value), streams, force)
            self._resetting.discard(group.group_id)
            if group.group_id not in self._paused:
                self._resume(group)

        self._wait(group, 0.0 if force else drain_timeout_s, carry_out)

    def _carry_out(self, group: Group, target: ResetTarget, streams: tuple[int, ...], force: bool) -> None:
        try:
            moves = self._store.reset(group.group_id, target, streams, reason=f"reset to {target}", force=force)
        except (Conflict, NotFound) as error:  # granted streams, or one whose rows were deleted meanwhile
            self._say(f"cannot reset {group.subscription}: {error}")
            return
        self.resets += 1
        self._say(f"has reset {group.subscription}")
        for stream_id, position in moves.items() if target.kind == "time" else ():
            stream, since = self._streams.streams[stream_id], self._simulation.journal.since(stream_id, target.value)
            if not stream.generation.gone and position != since:
                raise Violation(f"{group} was reset to {target}, stream {stream_id} to {position}, not {since}")

    def _held(self, group: Group) -> list[LendingRow]:
        rows = self._store.rows(group.group_id).values()
        return sorted((row for row in rows if row.status is LendingStatus.HELD), key=lambda row: row.stream_id)

    def _wait(self, group: Group, drain_timeout_s: float, then: Callable[[], None]) -> None:
        if self._held(group) and drain_timeout_s > 0:
            self._world.after(_POLL_INTERVAL_S, lambda: self._wait(group, drain_timeout_s - _POLL_INTERVAL_S, then))
        else:
            then()

    def _value_of(self, target: str) -> int:
        match target:
            case "shift":
                return self._random.randint(-8, 8)
            case "offset":
                return self._random.randint(0, 30)
            case "time":
                return self._world.clock_us() - round(self._random.uniform(0.0, 20.0) * 1_000_000)
            case _:
                return 0

    # --- silent holders and expired messages ------------------------------------------------------------------------

    def _revoke_in_silence(self, group: Group) -> None:
        """Force the revoke of a stream from a slow holder, which is cut off at about the deadline."""
        if not (rows := self._held(group)):
            return
        row = self._random.choice(rows)
        paths = self._random.choice((BOTH_DIRECTIONS, ("back",)))
        self._say(f"wants stream {row.stream_id} of group {group.group_id} back")
        holder = self._simulation.agents[row.agent or ""]
        slow_s = self._random.choice((0.0, 2.0, 6.0))
        holder.slow_until = self._world.now + slow_s + 14.0

        def revoke() -> None:
            for node in self._simulation.nodes:
                node.revoke(group.group_id, row.stream_id)

        self._world.after(slow_s, revoke)

        def fall_silent() -> None:
            if self._world.now < self._until:
                self._simulation.network.isolate(holder.name, paths, 15.0)

        due_s = self._simulation.revoke_deadline_s
        later_s = self._random.choice((0.0, self._random.uniform(0.0, due_s), due_s - 0.2))
        self._world.after(slow_s + later_s, fall_silent)

    def _make_anew(self, group: Group) -> None:
        """Delete a group, and mostly declare it anew, while a holder is cut off."""
        if rows := self._held(group):
            holder = self._random.choice(rows).agent or ""
            for node in self._simulation.nodes:
                paths = self._random.choice((BOTH_DIRECTIONS, ("back",)))
                self._simulation.network.part(holder, node.address, paths, 12.0)
            self._simulation.groups.delete(group.subscription)

    def _start_twin(self) -> None:
        """Start a process under the name of one that is at work and cut off."""
        named = [one for one in self._simulation.living() if one.session is not None and one.checkpoint is None]
        if named and len(self._simulation.living()) < _MAX_AGENTS:
            before, paths = self._random.choice(named), self._random.choice((BOTH_DIRECTIONS, ("back",)))
            self._simulation.network.isolate(before.name, paths, 12.0)
            self._world.after(self._random.uniform(0.0, 2.0), partial(self._simulation.join, before))

    def _retire(self) -> None:
        """Let retention delete what groups have not read, except `$queue` groups and, here, atomic ones, which would
        have to be reset as a whole."""
        oldest = next((g for g in self._streams.generations.values() if g.closed and not g.gone), None)
        if oldest is None:
            return
        deliveries = self._simulation.checkers.deliveries
        for life in self._simulation.checkers.lives.live():
            holds = life.group.subscription.kind == "queue" or life.group.options.atomic
            group_id = life.group.group_id
            wanted = [s for s in oldest.stream_ids if life.start(s) is not None]
            if holds and not all(deliveries.is_consumed(group_id, s) for s in wanted):
                return
        self._world.say("retention", f"takes generation {oldest.generation_id}, read or not")
        self._streams.expire_generation(oldest.generation_id)
        self._world.after(self._random.uniform(6.0, 12.0), self._unblock)

    def _say(self, what: str) -> None:
        self._world.say("operator", what)
