"""A world of publishers, a network and listeners, whose truth is a table of objects; time is a number."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable

from sublet_protocol.tick import Tick
from sublet_storage.notify.catch_up_scheduler import StartCatchUp
from sublet_storage.notify.changes import CatchUpSnapshot, NotifySettings, ObjectChange
from sublet_storage.notify.codec import decode
from sublet_storage.notify.publisher_machine import (
    ChangesQueued,
    NotificationPublisherMachine,
    NotificationSendersOpened,
    PublisherCloseRequested,
)
from sublet_storage.notify.publisher_machine import Event as SaidEvent
from sublet_storage.notify.subscriber_machine import NotificationSubscriberMachine
from sublet_storage.notify.subscriber_machine_events import (
    CatchUpCompleted,
    ChangeOrderUnknown,
    Event,
    ListeningStarted,
    ListeningStopped,
    NotificationReceived,
    SubscriberStarted,
)
from sublet_storage.notify.version_cache import ChangeNovelty, VersionCache

CHANNELS = ("stream", "space")
SETTINGS = NotifySettings(
    catch_up_interval_s=1e6, poll_interval_s=1e6, publisher_expiry_s=60.0, tombstone_retention_s=1e6
)
"""Nothing is healed by reads that nobody asked for."""

READ_S = 0.05
UNDER_WAY_S = 0.15
"""The longest that a message is under way; with the time it waits for others less than the gap window."""


class World:
    """Everything happens at a time, in the order of times."""

    def __init__(self, seed: int, *, publishers: int = 3, listeners: int = 2, settings: NotifySettings = SETTINGS):
        self.random = random.Random(seed)
        self.settings = settings
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.truth: dict[tuple[str, str], ObjectChange] = {}
        self.versions: dict[tuple[str, str], int] = {}
        self.loss = self.repeats = 0.0
        self.listeners = [Node(self) for _ in range(listeners)]
        self.publishers = [Speaker(self, f"p{number}") for number in range(publishers)]

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (max(when, self.now), next(self._numbers), do))

    def run(self, until: float) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, do = heapq.heappop(self._agenda)
            do()
        self.now = until

    def change(self, kind: str, key: str, deleted: bool) -> ObjectChange:
        """Commit a change of one object; its version has never been used."""
        place = kind, key
        version = self.versions[place] = self.versions.get(place, 0) + 1
        self.truth[place] = ObjectChange(kind, key, version, deleted, None if deleted else {"v": version})
        return self.truth[place]

    def living(self, kind: str) -> dict[str, ObjectChange]:
        return {key: change for (its, key), change in self.truth.items() if its == kind and not change.is_deleted}

    def send(self, message: bytes) -> None:
        """Send to every listener: lost, repeated, in any order."""
        for node in self.listeners:
            copies = 1 + (self.random.random() < self.repeats)
            for _ in range(copies):
                if self.random.random() >= self.loss:
                    self.at(
                        self.now + self.random.uniform(0, UNDER_WAY_S),
                        lambda node=node, connection=node.connection: node.receive(message, connection),  # type: ignore[misc]
                    )


class Speaker:
    """A publisher's process, which may die and live again."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._lives = 0
        self.is_alive = False
        self.start()

    def start(self) -> None:
        self._lives += 1
        self.is_alive = True
        self._machine = NotificationPublisherMachine(self._name, f"i{self._lives}", self._world.settings, max_waiting=4)
        self.do(NotificationSendersOpened(400))

    def do(self, event: SaidEvent) -> None:
        if self.is_alive:
            life, outcome = self._lives, self._machine.decide(event, self._world.now)
            for message in outcome.sends:
                self._world.send(message)
            if outcome.wake_at is not None:
                self._world.at(outcome.wake_at, lambda: self._wake(life))

    def _wake(self, life: int) -> None:
        if life == self._lives:
            self.do(Tick())

    def notify(self, changes: Iterable[ObjectChange]) -> None:
        self.do(ChangesQueued(tuple(changes)))

    def die(self) -> None:
        self.is_alive = False
        self._lives += 1

    def leave(self) -> None:
        self.do(PublisherCloseRequested())
        self.die()


class Node:
    """A listener with its cache; all changes that it was ever notified of, in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.cache = VersionCache(world.settings.tombstone_retention_s)
        self.listener = NotificationSubscriberMachine(world.settings, pushes=True, channels=CHANNELS)
        self.connection = 0
        self.is_connected = False
        self.changes: list[ObjectChange] = []
        self.caught_up_at: list[tuple[float, StartCatchUp]] = []
        self.reads_fail = 0.0
        self.do(SubscriberStarted())
        self.connect()

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.connection += 1
            self.do(ListeningStarted())

    def lose(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.do(ListeningStopped())

    def receive(self, message: bytes, connection: int) -> None:
        """Drop messages that were sent to another connection."""
        if self.is_connected and connection == self.connection:
            self.do(NotificationReceived(decode(message)))

    def do(self, event: Event) -> None:
        outcome = self.listener.decide(event, self._world.now, self._world.random.random())
        for change in outcome.changes:
            verdict = self.cache.apply(change, self._world.now)
            if verdict is ChangeNovelty.NEWER:
                self.changes.append(change)
            elif verdict is ChangeNovelty.AMBIGUOUS:
                self.do(ChangeOrderUnknown(change.kind))
        for catch_up in outcome.catch_ups:
            self._begin(catch_up)
        if outcome.wake_at is not None:
            self._world.at(outcome.wake_at, lambda: self.do(Tick()))

    def _begin(self, catch_up: StartCatchUp) -> None:
        self.caught_up_at.append((self._world.now, catch_up))
        begun = self.cache.begin_snapshot()
        at = self._world.now + self._world.random.uniform(0, READ_S)
        self._world.at(at, lambda: self._read(catch_up.channel, begun))

    def _read(self, channel: str, begun: int) -> None:
        """Read one instant; the answer comes a little later."""
        snapshot = CatchUpSnapshot(tuple(self._world.living(channel).values()))
        ok = self._world.random.random() >= self.reads_fail
        self._world.at(
            self._world.now + self._world.random.uniform(0, READ_S), lambda: self._merge(channel, snapshot, begun, ok)
        )

    def _merge(self, channel: str, snapshot: CatchUpSnapshot, begun: int, ok: bool) -> None:
        if ok:
            self.changes += self.cache.merge(channel, snapshot, begun, self._world.now)
        self.do(CatchUpCompleted(channel, ok))
