"""Whatever becomes of the messages: soon after things are quiet, every cache is the truth, and never went back."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet_protocol.tick import Tick
from sublet_storage.notify.catch_up_scheduler import CatchUpCause
from sublet_storage.notify.changes import (
    ChangeNotification,
    MalformedNotification,
    Message,
    NotificationHeartbeat,
    NotifySettings,
    ObjectChange,
    stream_change,
)
from sublet_storage.notify.codec import decode, encode
from sublet_storage.notify.publisher_machine import (
    MAX_WAITING,
    ChangesQueued,
    NotificationPublisherMachine,
    NotificationSendersOpened,
)
from sublet_storage.notify.subscriber_machine import NotificationSubscriberMachine
from sublet_storage.notify.subscriber_machine_events import (
    CatchUpCompleted,
    Event,
    ListeningStarted,
    NotificationReceived,
    SubscriberStarted,
)
from sublet_storage.notify.version_cache import VersionCache
from tests.property.notify_world import CHANNELS, READ_S, SETTINGS, UNDER_WAY_S, World
from tests.support.notifications import list_objects

QUIET_S = SETTINGS.hello_interval_s + UNDER_WAY_S + 2 * SETTINGS.gap_window_s + SETTINGS.catch_up_jitter_s + 2 * READ_S
QUIET_S += SETTINGS.catch_up_min_interval_s


def trouble(world: World, turmoil: bool = True) -> None:
    """One thing that happens; without turmoil nobody dies, leaves or is cut off, which would heal much."""
    speaker, node, chance = world.random.choice(world.publishers), world.random.choice(world.listeners), world.random
    match chance.randrange(0 if turmoil else 3, 20):
        case 0:
            speaker.die() if speaker.is_alive else speaker.start()
        case 1:
            node.lose() if node.is_connected else node.connect()
        case 2:
            speaker.leave() if speaker.is_alive else speaker.start()
        case 3:
            world.run(world.now + chance.uniform(0, 8))
        case _:
            changes = [
                world.change(chance.choice(CHANNELS), chance.choice("abcde"), chance.random() < 0.3)
                for _ in range(chance.randrange(1, 7))
            ]
            speaker.notify(changes)  # the dead one has committed, and dies before it can publish that


def calm(world: World) -> None:
    """Bring all back to life and reconnect them; from now on nothing is lost."""
    world.loss = 0.0
    for node in world.listeners:
        node.connect()
        node.reads_fail = 0.0
    for speaker in world.publishers:
        if not speaker.is_alive:
            speaker.start()
    world.run(world.now + QUIET_S)


@pytest.mark.conforms("D3", "D5", "D6", "D7", "D9")
@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.3]), st.booleans())
def test_when_all_is_quiet_every_cache_is_the_truth(seed: int, loss: float, repeats: float, turmoil: bool) -> None:
    world = World(seed)
    world.loss, world.repeats = loss, repeats
    for node in world.listeners:
        node.reads_fail = world.random.choice([0.0, 0.2])
    for _ in range(50):
        trouble(world, turmoil)
        world.run(world.now + world.random.choice([0.0, 0.01, 0.1, 1.0]))
    calm(world)
    for node in world.listeners:
        for kind in CHANNELS:
            known = {key: change.version for key, change in list_objects(node.cache, kind).items()}
            assert known == {key: change.version for key, change in world.living(kind).items()}
        newest: dict[tuple[str, str], int] = {}
        for change in node.changes:
            place = change.kind, change.key
            assert change.order_key > newest.get(place, -1), "an older version came after a newer one"
            newest[place] = change.order_key


@pytest.mark.conforms("D1", "D10")
@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_catch_ups_alone_make_every_cache_the_truth(seed: int) -> None:
    world = World(seed, settings=NotifySettings())
    world.loss = 1.0
    for _ in range(20):
        trouble(world)
        world.run(world.now + 0.1)
    for node in world.listeners:
        node.connect()
    world.run(world.now + world.settings.catch_up_interval_s + 1)
    for node in world.listeners:
        assert all(list_objects(node.cache, kind).keys() == world.living(kind).keys() for kind in CHANNELS)


@pytest.mark.conforms("D4")
@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 12), st.data())
def test_one_gap_is_one_catch_up(seed: int, missing: int, data: st.DataObject) -> None:
    """A steady publisher says `missing` messages that do not come, and one that does; some of them come late."""
    chance = random.Random(seed)
    machine = NotificationPublisherMachine("p", "i", SETTINGS)
    hello = machine.decide(NotificationSendersOpened(None), 0.0).sends[0]
    said = [
        machine.decide(ChangesQueued((stream_change(1, n, False),)), n * 0.1).sends[0] for n in range(1, missing + 3)
    ]
    late = data.draw(st.lists(st.integers(1, missing), unique=True))
    listener = NotificationSubscriberMachine(SETTINGS, pushes=True, channels=CHANNELS)
    received = [NotificationReceived(decode(message)) for message in (hello, said[0])]
    settle(listener, [SubscriberStarted(), ListeningStarted(), *received])
    began = 100.0
    listener.decide(NotificationReceived(decode(hello)), began - 1, 0.0)  # it is not silent
    found = [listener.decide(NotificationReceived(decode(said[-1])), began, 0.0).catch_ups]
    for index in late:
        at = began + chance.uniform(0, SETTINGS.gap_window_s * 0.99)
        found.append(listener.decide(NotificationReceived(decode(said[index])), at, 0.0).catch_ups)
    assert not any(found), "nothing is read while the missing ones may still come"
    reads = [
        each.causes for step in range(1, 40) for each in listener.decide(Tick(), began + step * 0.1, 0.0).catch_ups
    ]
    assert reads == ([] if len(late) == missing else [frozenset({CatchUpCause.GAP})])
    assert (listener.counters.filled_gaps, listener.counters.expired_gaps) == (int(not reads), int(bool(reads)))


def settle(listener: NotificationSubscriberMachine, events: list[Event]) -> None:
    """Let it do all that these events ask for, until nothing is asked for any more."""
    for event in events:
        listener.decide(event, 0.0, 0.0)
    for step in range(21):
        for channel in CHANNELS:
            listener.decide(CatchUpCompleted(channel, True), 0.3 * step, 0.0)
        if step < 20:
            listener.decide(Tick(), 0.3 * step, 0.0)


NAME = st.text(min_size=1, max_size=20)
NUMBER = st.integers(0, 2**63)
DATA = st.none() | st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | NUMBER | st.text(max_size=9))


def changes_of(kind: str) -> st.SearchStrategy[tuple[ObjectChange, ...]]:
    change = st.builds(ObjectChange, st.just(kind), NAME, NUMBER, st.booleans(), DATA)
    return st.lists(change, max_size=4).map(tuple)


ENVELOPE = NAME.flatmap(
    lambda kind: st.builds(
        lambda publisher, incarnation, predecessor, more, changes: ChangeNotification(
            publisher, incarnation, kind, predecessor + more, predecessor, changes
        ),
        *(NAME, NAME, NUMBER, st.integers(1, 9), changes_of(kind)),
    )
)
HELLO = st.builds(NotificationHeartbeat, NAME, NAME, st.dictionaries(NAME, NUMBER, max_size=5), st.booleans())


@given(ENVELOPE | HELLO)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    raw = encode(message)
    assert raw.isascii()
    assert decode(raw) == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from("ehpilsbcx"), inner, max_size=6),
    max_leaves=20,
)


DAMAGED = st.tuples(ENVELOPE.map(encode), st.integers(0, 300), st.binary(max_size=12)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + len(parts[2]) :]
)


@settings(max_examples=200)
@given(st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()) | DAMAGED)
def test_what_is_no_message_is_refused_by_name(raw: bytes) -> None:
    """Or it is another message."""
    with contextlib.suppress(MalformedNotification):
        found = decode(raw)
        assert found == decode(encode(found))


@given(st.integers(0, 2**32), st.integers(200, 3000))
def test_what_is_announced_fits_and_loses_nothing(seed: int, limit: int) -> None:
    """Every object that was published is in some message at its newest version, or its channel shows a hole."""
    chance = random.Random(seed)
    machine = NotificationPublisherMachine("p", "i", SETTINGS)
    machine.decide(NotificationSendersOpened(limit), 0.0)
    newest: dict[str, int] = {}
    sent: list[bytes] = []
    for step in range(30):
        changes = []
        for _ in range(chance.randrange(30)):
            key = str(chance.randrange(40))
            newest[key] = newest.get(key, 0) + 1
            data = {"long": "x" * chance.randrange(400)} if chance.random() < 0.3 else None
            changes.append(ObjectChange("stream", key, newest[key], data=data))
        sent += machine.decide(ChangesQueued(tuple(changes)), step * 0.001).sends
    sent += machine.decide(Tick(), 1e3).sends
    assert all(len(message) <= limit for message in sent)
    envelopes = [each for each in map(decode, sent) if isinstance(each, ChangeNotification)]
    assert [each.predecessor for each in envelopes] == [0, *(each.sequence for each in envelopes)][:-1]
    reported = {change.key: change.version for each in envelopes for change in each.changes}
    assert reported == newest


def test_of_what_waits_the_newest_remains() -> None:
    machine = NotificationPublisherMachine("p", "i", SETTINGS)
    for number in range(2 * MAX_WAITING):
        machine.decide(ChangesQueued((stream_change(number, 1, False),)), 0.0)
    (_, *envelopes) = map(decode, machine.decide(NotificationSendersOpened(None), 0.0).sends)
    keys = [change.key for each in envelopes if isinstance(each, ChangeNotification) for change in each.changes]
    assert keys == [str(number) for number in range(MAX_WAITING, 2 * MAX_WAITING)]


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=30), st.randoms())
def test_changes_in_any_order_end_in_the_same_state(reported: list[tuple[int, bool]], chance: random.Random) -> None:
    changes = [ObjectChange("space", "a", version, deleted) for version, deleted in reported]
    newest = max(changes, key=lambda change: change.order_key)
    chance.shuffle(changes)
    cache = VersionCache(1e9)
    for change in [*changes, *changes]:
        cache.apply(change, 0.0)
    assert list_objects(cache, "space") == ({} if newest.is_deleted else {"a": newest})
