"""Schedule of a run, drawn from one seed: kills, freezes, stops, and operator commands."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Kinds: TypeAlias = Mapping[str, tuple[int, Callable[[random.Random, float], Iterator[T]]]]
"""{name: (weight, how it is drawn)}."""

NODES = ("n1", "n2", "n3")
WORKERS = ("worker-1", "worker-2", "worker-3")
PUBLISHERS = ("publisher-1", "publisher-2")
OPERATOR = "operator"
LEADER = "leader"
"""The node that leads at that time."""

NETWORK = "network"
PROXIED = ("n1", "worker-1", "publisher-1")
"""Processes that reach the database through a proxy; the others use the server's socket."""

ENDS = ("kill", "stop", "replace")
"""Faults that a process does not survive."""

MOVED = "$share/moved/#"
"""The group that is paused and reset."""

OWN = "a"
"""A space that exists from the beginning, besides `default`."""

HABITS = ("work-fails", "loop-breaks")
"""Faults that consumers cause by themselves, now and then."""

QUIET_S = 2.0
"""Time without faults at the beginning, so that every process has work in hand."""


@dataclass(frozen=True, slots=True)
class Deed:
    """A fault at `at_s` of the run. `lasts_s`: how long the process is frozen, or until it is started again."""

    at_s: float
    what: str
    whom: str = ""
    lasts_s: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:7.1f} s  {self.what} {self.whom}{lasts}"


@dataclass(frozen=True, slots=True)
class Order:
    """A command of `sublet` that the operator runs at `at_s`."""

    at_s: float
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  sublet {' '.join(self.command)}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of a run of `seconds`. `notify`: the notification driver of its nodes. `spared`: processes that are
    not killed; all other faults apply to them too."""

    seed: int
    seconds: float
    deeds: tuple[Deed, ...]
    orders: tuple[Order, ...]
    without: frozenset[str] = frozenset()
    notify: str = "poll"
    spared: frozenset[str] = frozenset()

    def __str__(self) -> str:
        every: list[Deed | Order] = [*self.deeds, *self.orders]
        reported = [str(each) for each in sorted(every, key=lambda each: each.at_s)]
        return "\n".join([f"nodes are notified of messages by {self.notify}", *reported])


def draw(
    seed: int,
    seconds: float,
    deed_every_s: float,
    order_every_s: float,
    without: Collection[str] = (),
    spared: Collection[str] = (),
) -> Plan:
    """Return the plan of a seed; `without`: kinds of deeds, orders and habits that are left out, by name."""
    chance = random.Random(seed)
    deeds = tuple(_drawn(chance, DEEDS, seconds, deed_every_s, without))
    orders = tuple(_drawn(chance, ORDERS, seconds, order_every_s, without))
    notify = chance.choice(("poll", "postgres"))
    return Plan(seed, seconds, deeds, orders, frozenset(without), notify, frozenset(spared))


def _drawn(
    chance: random.Random, kinds: Kinds[T], seconds: float, every_s: float, without: Collection[str]
) -> Iterator[T]:
    at_s = QUIET_S
    names = [name for name in kinds if name not in without]
    weights = [kinds[name][0] for name in names]
    while (at_s := at_s + chance.expovariate(1 / every_s)) < seconds:
        (name,) = chance.choices(names, weights)
        yield from kinds[name][1](chance, at_s)


# --- faults of processes ----------------------------------------------------------------------------------------------


def _deed(
    what: Sequence[str], whom: Sequence[str], least_s: float = 0.0, most_s: float = 0.0
) -> Callable[[random.Random, float], Iterator[Deed]]:
    def drawn(chance: random.Random, at_s: float) -> Iterator[Deed]:
        yield Deed(at_s, chance.choice(what), chance.choice(whom), chance.uniform(least_s, most_s))

    return drawn


def _all_workers(chance: random.Random, at_s: float) -> Iterator[Deed]:
    """Yield the kills of all consumers, which leave a backlog for when they come back."""
    for worker in WORKERS:
        yield Deed(at_s, "kill", worker, chance.uniform(3, 8))


def _backend(what: str, most_s: float = 0.0) -> Callable[[random.Random, float], Iterator[Deed]]:
    def drawn(chance: random.Random, at_s: float) -> Iterator[Deed]:
        yield Deed(at_s, what, f"backend {chance.randrange(1000) / 1000}", chance.uniform(min(0.3, most_s), most_s))

    return drawn


DEEDS: Kinds[Deed] = {
    "kill-node": (10, _deed(["kill"], NODES, 0.1, 5)),
    "kill-worker": (14, _deed(["kill"], WORKERS, 0.1, 5)),
    "kill-all-workers": (4, _all_workers),
    "kill-publisher": (9, _deed(["kill"], PUBLISHERS, 0.1, 2)),
    "kill-operator": (3, _deed(["kill"], [OPERATOR], 0.1, 2)),
    "stop": (8, _deed(["stop"], (*NODES, *WORKERS), 0.1, 2)),
    "freeze": (14, _deed(["freeze"], (*NODES, *WORKERS, *WORKERS, *PUBLISHERS), 0.5, 8)),
    # It is frozen, another of its name is started, and it returns.
    "replace": (4, _deed(["replace"], PUBLISHERS, 0.5, 4)),
    "leader": (8, _deed(["kill", "freeze"], [LEADER], 0.5, 5)),
    # Connections of the processes behind the proxy are closed, or stay open and carry nothing.
    "network": (8, _deed(["cut", "hold"], [NETWORK], 0.3, 6)),
    "kill-postmaster": (2, _deed(["kill"], ["postmaster"])),
    "restart-postmaster": (2, _deed(["restart"], ["postmaster"])),
    "kill-backend": (2, _backend("kill")),
    "terminate-backend": (14, _backend("terminate")),
    "freeze-backend": (8, _backend("freeze", 4)),
}


# --- operator commands ------------------------------------------------------------------------------------------------

_PASSING = ("b", "c")
"""Spaces that are created and dropped."""

_SPACES = ("default", "default", OWN, OWN, *_PASSING)


def _rollover(chance: random.Random, at_s: float) -> Iterator[Order]:
    yield Order(at_s, ("spaces", "rollover", chance.choice(_SPACES)))


def _empty(chance: random.Random, at_s: float) -> Iterator[Order]:
    """Yield rollovers at one time, so that hardly anything is published between them."""
    space = chance.choice(_SPACES)
    for _ in range(chance.randint(2, 3)):
        yield Order(at_s, ("spaces", "rollover", space))


def _reshard(chance: random.Random, at_s: float) -> Iterator[Order]:
    yield Order(at_s, ("spaces", "reshard", chance.choice(_SPACES), str(chance.randint(1, 4))))


def _space(chance: random.Random, at_s: float) -> Iterator[Order]:
    space = chance.choice(_PASSING)
    create = ("spaces", "create", space, f"{space}/#", "--shards", str(chance.randint(1, 3)), "--retention", "30d")
    yield Order(at_s, create)
    yield Order(at_s + chance.uniform(2, 20), ("spaces", "drop", space, "--keep", "--yes"))


def _pause(chance: random.Random, at_s: float) -> Iterator[Order]:
    yield Order(at_s, ("groups", "pause", MOVED))
    yield Order(at_s + chance.uniform(0.5, 5), ("groups", "resume", MOVED))


def _reset(chance: random.Random, at_s: float) -> Iterator[Order]:
    places = (
        ("--to-earliest",),
        ("--to-latest",),
        ("--to-current",),
        ("--shift-by", str(chance.randint(-50, 20))),
        ("--by-duration", f"{chance.randint(1, 30)}s"),
    )
    how = ("--force",) if chance.random() < 0.3 else ("--timeout", "20s")
    yield Order(at_s, ("groups", "reset", MOVED, *chance.choice(places), *how, "--yes"))


def _step_down(chance: random.Random, at_s: float) -> Iterator[Order]:
    yield Order(at_s, ("nodes", "step-down", chance.choice(NODES), "--wait", "0"))


def _drain(chance: random.Random, at_s: float) -> Iterator[Order]:
    node = chance.choice(NODES)
    yield Order(at_s, ("nodes", "drain", node, "--wait", "0"))
    yield Order(at_s + chance.uniform(1, 8), ("nodes", "drain", node, "--undo", "--wait", "0"))


ORDERS: Kinds[Order] = {
    "rollover": (8, _rollover),
    "empty-generations": (6, _empty),
    "reshard": (5, _reshard),
    "spaces": (4, _space),
    "pause": (2, _pause),
    "reset": (4, _reset),
    "step-down": (3, _step_down),
    "drain": (2, _drain),
}
