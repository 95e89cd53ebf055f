"""Two nodes with drifting clocks, one lease table, and a network that delays, loses and repeats what they say.

Safety, at every instant looked at: at most one node trusts itself to lead, only under the term the table bears, and
only while the table's lease lives; no node leads twice under one term. Liveness, once the faults have stopped:
somebody leads what is wanted. One seed is one run; a failure names its seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from sublet_leader import election
from sublet_leader.settings import LeaderSettings
from sublet_protocol.tick import Tick
from sublet_storage.node_directory import NodeIncarnation
from tests.support.memory_store.catalogue import MemoryCatalogue
from tests.support.memory_store.groups import MemoryGroupStore

SETTINGS = LeaderSettings()
IDS = (1, 2)
TROUBLE_S, CALM_S = 90.0, 45.0
GIVEN_UP_AFTER_S = 1.0
LATE_TICK_S = 0.001


@dataclass
class Node:
    """A machine with its own idea of time: `offset_s` plus `rate` of its seconds for each real one."""

    ref: NodeIncarnation
    offset_s: float
    rate: float
    machine: election.Election
    wants: set[int] = field(default_factory=set)
    paused_until: float = 0.0
    cut_off_until: float = 0.0

    def clock(self, real_s: float) -> float:
        """Return this node's monotonic clock."""
        return self.offset_s + real_s * self.rate

    def real(self, clock_s: float) -> float:
        """Return the real time at which that clock shows this."""
        return (clock_s - self.offset_s) / self.rate


class World:
    """The table, the nodes, what will happen and when, and what has been seen."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 1000.0
        self.end_s = self.now_s + TROUBLE_S
        self.store = MemoryGroupStore(MemoryCatalogue(), lambda: round(self.now_s * 1e6))
        self.nodes = [self._node("a"), self._node("b")]
        self.led: set[tuple[int, int]] = set()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def _node(self, name: str) -> Node:
        ref = NodeIncarnation(name, f"{name}-life", f"{name}:1")
        offset_s, rate = self.random.choice((-600.0, 0.0, 600.0)), self.random.choice((0.95, 1.0, 1.05))
        return Node(ref, offset_s, rate, election.Election(SETTINGS, ref.incarnation))

    # --- time -------------------------------------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Put something on the agenda."""
        heapq.heappush(self._agenda, (max(when, self.now_s), next(self._numbers), act))

    def run_until(self, end_s: float) -> None:
        """Do what is on the agenda, in order, and look at the world just before and after each."""
        while self._agenda[0][0] <= end_s:
            when, _, act = heapq.heappop(self._agenda)
            self.now_s = when
            self.check()
            act()
            self.check()

    def look_often(self) -> None:
        """Check in between, too."""
        self.at(self.now_s + 0.2, self.look_often)

    # --- nodes ------------------------------------------------------------------------------------------------------

    def decide(self, node: Node, event: election.Event) -> None:
        """One step of a node, when it is not paused: its attempts go on their way, its notices are checked."""
        if self.now_s < node.paused_until:
            self.at(node.paused_until, lambda: self.decide(node, event))
            return
        outcome = node.machine.decide(event, node.clock(self.now_s))
        self._attempt(node, outcome)
        for notice in outcome.notices:
            if isinstance(notice, election.LeadershipAcquired):
                assert (notice.leadership_id, notice.term) not in self.led, "led twice under one term"
                self.led.add((notice.leadership_id, notice.term))
        if outcome.wake_at is not None:
            self.at(node.real(outcome.wake_at) + LATE_TICK_S, lambda: self.decide(node, Tick()))

    def _attempt(self, node: Node, outcome: election.ElectionOutcome) -> None:
        started, lease_s, jitter_s = node.clock(self.now_s), SETTINGS.lease_duration_s, self.random.uniform(0, 0.2)
        for i in outcome.claims:
            self._send(
                node,
                lambda i=i: election.ClaimCompleted(i, started, self.store.claim(i, node.ref, lease_s), jitter_s),  # type: ignore[misc]
                election.ClaimCompleted(i, started, None, jitter_s),
            )
        if outcome.renew:
            self._send(
                node,
                lambda: election.RenewCompleted(started, self.store.renew(node.ref, outcome.renew, lease_s)),
                election.RenewCompleted(started, None),
            )
        if outcome.release:
            self._send(
                node,
                lambda: self._release(node, outcome.release),
                election.ReleaseCompleted(outcome.release, is_done=False),
            )

    def _release(self, node: Node, terms: object) -> election.Event:
        assert isinstance(terms, dict)
        self.store.release(node.ref, terms)
        return election.ReleaseCompleted(terms, is_done=True)

    # --- the network ------------------------------------------------------------------------------------------------

    def _send(self, node: Node, run: Callable[[], election.Event], failed: election.Event) -> None:
        """A statement on its way: it arrives and is answered, or fails with or without having arrived, or both."""
        calm = self.now_s >= self.end_s
        fate = (
            "fine"
            if calm
            else self.random.choices(("fine", "lost", "unanswered", "late", "twice"), (80, 5, 5, 5, 5))[0]
        )
        if not calm and self.now_s < node.cut_off_until:
            fate = "lost"
        arrives = self.now_s + self._delay_s(calm)
        if fate in ("fine", "twice"):
            self.at(arrives, lambda: self._answer(node, run(), calm))
        else:
            self.at(self.now_s + GIVEN_UP_AFTER_S, lambda: self.decide(node, failed))
        if fate == "unanswered":
            self.at(arrives, lambda: self._ignore(run()))
        if fate in ("late", "twice"):
            self.at(arrives + self.random.uniform(0, 12), lambda: self._ignore(run()))

    def _answer(self, node: Node, event: election.Event, calm: bool) -> None:
        self.at(self.now_s + self._delay_s(calm), lambda: self.decide(node, event))

    def _ignore(self, event: election.Event) -> None:
        """Ignore the answer to an executed statement."""

    def _delay_s(self, calm: bool) -> float:
        return 0.01 if calm else self.random.choice((0.001, 0.01, 0.01, 0.05, 0.05, 0.4, 0.4, 3.0, 6.0))

    # --- trouble ----------------------------------------------------------------------------------------------------

    def trouble(self) -> None:
        """Now and then something happens to a node, or to what it wants."""
        if self.now_s >= self.end_s:
            return
        node, leadership_id = self.random.choice(self.nodes), self.random.choice(IDS)
        match self.random.choice(("want", "want", "unwant", "blink", "drain", "pause", "cut off", "cut off")):
            case "want":
                self.want(node, leadership_id)
            case "unwant":
                self.unwant(node, leadership_id)
            case "blink":
                self.unwant(node, leadership_id)
                self.at(self.now_s + self.random.uniform(0, 0.1), lambda: self.want(node, leadership_id))
            case "drain":
                node.wants.clear()
                self.decide(node, election.ResignAll())
            case "pause":
                node.paused_until = self.now_s + self.random.uniform(0, 20)
            case _:
                node.cut_off_until = self.now_s + self.random.uniform(0, 20)
        self.at(self.now_s + self.random.uniform(0, 8), self.trouble)

    def want(self, node: Node, leadership_id: int) -> None:
        """Make the node campaign."""
        node.wants.add(leadership_id)
        self.decide(node, election.StartCampaign(leadership_id))

    def unwant(self, node: Node, leadership_id: int) -> None:
        """Make the node resign."""
        node.wants.discard(leadership_id)
        self.decide(node, election.Resign(leadership_id))

    # --- what must be true ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that no node wrongly acts as leader."""
        claims = self.store.read_leaderships(IDS)
        for leadership_id in IDS:
            trusting = self.trusting(leadership_id)
            assert len(trusting) <= 1, f"two leaders of {leadership_id}: {trusting}"
            for name, term in trusting.items():
                claim = claims[leadership_id]
                assert (name, term) == (claim.node.name, claim.term)
                assert claim.remaining_s > 0, f"{name} trusts a lease that ran out {-claim.remaining_s} s ago"

    def trusting(self, leadership_id: int) -> dict[str, int]:
        """Return the nodes that act as leader at this moment, and their terms."""
        asked = {node.ref.name: node.machine.trusted_term(leadership_id, node.clock(self.now_s)) for node in self.nodes}
        return {name: term for name, term in asked.items() if term is not None}


def play(seed: int) -> World:
    """Execute one run: trouble, then calm."""
    world = World(seed)
    world.at(world.now_s, world.look_often)
    world.at(world.now_s, world.trouble)
    for node, leadership_id in itertools.product(world.nodes, IDS):
        world.want(node, leadership_id)
    world.run_until(world.end_s)
    for node in world.nodes:
        node.paused_until = min(node.paused_until, world.now_s)
    world.run_until(world.end_s + CALM_S)
    return world


@pytest.mark.conforms("E13", "E14", "E15")
@pytest.mark.parametrize("seeds", [range(n, n + 50) for n in range(0, 250, 50)], ids=lambda seeds: f"from {seeds[0]}")
def test_never_two_trusted_leaders_and_in_the_end_one(seeds: range) -> None:
    for seed in seeds:
        try:
            world = play(seed)
            for leadership_id in IDS:
                wanted = any(leadership_id in node.wants for node in world.nodes)
                assert len(world.trusting(leadership_id)) == wanted, f"{leadership_id} is wanted: {wanted}"
        except AssertionError as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken


def test_the_runs_are_worth_something() -> None:
    """Leaderships change hands under trouble: a run in which nothing happens proves nothing."""
    assert sum(len(play(seed).led) for seed in range(10)) > 50
