"""The queue between those who publish and the sender: which advances are due with what was taken."""

from __future__ import annotations

import contextlib
import itertools
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import SubletError, UsageError
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.producer import send_buffer as module
from sublet_storage.producer.batches.input_conversion import size_of, to_record_batches
from sublet_storage.producer.batches.pending_block import PendingArrowBatch, PendingBlock, find_entered_at
from sublet_storage.producer.batches.piece_routing import reroute_piece
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable, RoutedRows
from sublet_storage.producer.delivery import AGE_SPREAD_S, Delivery, Rows, SharedPublishResult
from sublet_storage.producer.send_buffer import BufferLimits, SendBuffer
from sublet_storage.spaces.routing import Space, StreamCatalogRow, split_ring
from tests.interrupted_calls import run_interrupted

ONE_MESSAGE = BufferLimits(
    block_messages=1, block_bytes=1 << 20, blocks_per_commit=1, buffered_bytes=1 << 20, linger_s=0.0
)


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> SendBuffer:
    """Of a space of one stream; each message is a load of its own, and the pause between two advances is a day."""
    monkeypatch.setattr(module, "ADVANCE_PAUSE_S", 86_400.0)
    return a_buffer(ONE_MESSAGE)


def a_buffer(limits: BufferLimits) -> SendBuffer:
    ((low, high),) = split_ring(1)
    streams = [StreamCatalogRow(1, 1, 1, low, high, 0)]
    return SendBuffer(PublisherRoutingTable([Space(1, "default", TopicFilter("#"), 1)], streams, None), limits)


def publish_in(buffer: SendBuffer, *epochs: int) -> None:
    """A message in each, and an advance behind it."""
    for epoch in epochs:
        buffer.add("t", None, b"", None, 0, (epoch,))
        buffer.advance([(epoch + 1,)])


def send(buffer: SendBuffer) -> int | None:
    """As the sender does: the epoch that is advanced to with the next load, if one is."""
    loads = buffer.take()
    assert loads is not None
    least = buffer.due_advance(loads)
    settle(buffer, loads)
    if least is None:
        return None
    buffer.complete_advance(least)
    return least[0][0]


def settle(buffer: SendBuffer, loads: list[PendingBlock]) -> None:
    for load in loads:
        load.complete(0)
    buffer.release_batches(loads)


def test_under_load_an_advance_waits_for_the_next(buffer: SendBuffer) -> None:
    publish_in(buffer, 1, 2, 3, 4)
    sent = [send(buffer) for _ in range(4)]
    assert sent == [2, None, None, 5], "the last has nothing behind it that it could wait for"
    buffer.flush(0.0)
    buffer.advance([(6,)])
    assert send(buffer) == 6, "alone"


def test_an_advance_waits_for_no_message_that_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADVANCE_PAUSE_S", 86_400.0)
    buffer = a_buffer(BufferLimits(2, 1 << 20, blocks_per_commit=1, buffered_bytes=1 << 20, linger_s=86_400.0))
    publish_in(buffer, 1)
    buffer.add("t", None, b"", None, 0, (2,))
    assert send(buffer) == 2
    publish_in(buffer, 2)
    for value in (b"fills the block", b"the next of its block may come in a day"):
        buffer.add("t", None, value, None, 0, (3,))
    assert send(buffer) == 3


def test_an_advance_taken_alone_is_made(buffer: SendBuffer) -> None:
    """Also where a message comes right then: without loads there is nothing to send instead."""
    publish_in(buffer, 1)
    assert send(buffer) == 2
    buffer.advance([(3,)])
    assert buffer.take() == []
    buffer.add("t", None, b"", None, 0, (3,))
    assert buffer.due_advance([]) == [(3,)]


def test_an_advance_put_off_outlives_a_later_failure(buffer: SendBuffer) -> None:
    publish_in(buffer, 1, 2, 3)
    assert [send(buffer) for _ in range(2)] == [2, None]
    lost = SubletError("it is lost")
    loads = buffer.take()
    assert loads is not None
    buffer.fail_batches(loads, lost)
    assert buffer.take() == []
    least = buffer.due_advance([])
    assert least == [(3,)], "the advance behind what was lost is given up"
    buffer.complete_advance(least)
    buffer.flush(0.0)
    assert buffer.pop_error() is lost


def test_an_advance_that_fails_takes_all_with_it(buffer: SendBuffer) -> None:
    publish_in(buffer, 1)
    assert send(buffer) == 2
    buffer.advance([(3,)])
    publish_in(buffer, 3)
    buffer.fail_batches([], SubletError("refused"))
    assert send(buffer) is None
    buffer.flush(0.0)


def test_a_failure_is_known_before_anybody_is_woken(buffer: SendBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who flushes is woken by the last ticket, and asks at once."""
    publish_in(buffer, 1)
    loads, lost = buffer.take(), SubletError("it is lost")
    assert loads is not None
    known: list[Exception | None] = []
    monkeypatch.setattr(PendingBlock, "fail", lambda load, error: known.append(buffer.pop_error()))
    buffer.fail_batches(loads, lost)
    assert known == [lost]


def test_whoever_flushes_waits_for_no_other_advance(buffer: SendBuffer) -> None:
    publish_in(buffer, 1, 2, 3)
    with pytest.raises(TimeoutError):
        buffer.flush(0.0)
    assert [send(buffer) for _ in range(3)] == [2, 3, 4]


class ReadySender:
    """A sender that only notes what it is to send at once."""

    is_ready = True

    def __init__(self) -> None:
        self.sent: list[PendingBlock] = []

    def send_at_once(self, load: PendingBlock) -> None:
        self.sent.append(load)


def test_a_message_overtakes_no_other() -> None:
    """While the sender takes nothing, it waits with the others."""
    buffer = a_buffer(ROOMY)
    buffer.sender = sender = ReadySender()
    for number in range(3):
        buffer.add("t", None, b"%d" % number, None, 0)
    loads = buffer.take()
    assert loads is not None
    assert (sender.sent, [load.count for load in loads]) == ([], [3])


def test_a_message_without_others_is_sent_at_once() -> None:
    """The sender gets it alone, in the order of publishing."""
    buffer, taken = a_buffer(ROOMY), list[list[PendingBlock]]()
    buffer.sender = ready = ReadySender()
    sent = ready.sent

    def take_all() -> None:
        while (loads := buffer.take()) is not None:
            taken.append(loads)
            settle(buffer, loads)

    sender = threading.Thread(target=take_all, daemon=True)
    sender.start()
    for number in itertools.count():
        buffer.add("t", None, b"%d" % number, None, 0)
        if number % 4 < 3:
            buffer.flush(60)
        if len(sent) >= 3:
            break
    buffer.flush(60)
    buffer.close(SubletError("closed"))
    sender.join(60)
    assert [load for loads in taken for load in loads if load in sent] == sent
    assert all(len(loads) == 1 for loads in taken if loads[0] in sent)
    values = [value for loads in taken for load in loads for value in load.to_batch().column("value").to_pylist()]
    assert values == [b"%d" % each for each in range(number + 1)]


# --- exceptions of signal handlers ------------------------------------------------------------------------------------

WHERE = Path(module.__file__).parent, Path(threading.__file__)
ROOMY = BufferLimits(block_messages=4, block_bytes=1 << 20, blocks_per_commit=8, buffered_bytes=2000, linger_s=0.0)


def publish(buffer: SendBuffer, value: bytes, topic: str = "t") -> Delivery | None:
    return buffer.add(topic, None, value, None, 0, wait=False)


def publish_all(buffer: SendBuffer) -> None:
    values = [b"b%d" % number for number in range(10)]
    buffer.add_batches(to_record_batches({"topic": ["t"] * 5 + ["u"] * 5, "value": values}))


def flush(buffer: SendBuffer) -> None:
    with contextlib.suppress(TimeoutError):
        buffer.flush(0.0)


def log_of(buffer: SendBuffer) -> dict[int, list[bytes]]:
    """What the sender gets of the buffer, by stream; all of it is stored."""
    log: dict[int, list[bytes]] = {}
    while buffer.queued_count:
        loads = buffer.take()
        assert loads is not None
        for load in loads:
            stream = log.setdefault(load.stream_id, [])
            batch = pa.RecordBatch.from_pydict(load.to_batch().to_pydict())
            assert set(batch.column("topic").to_pylist()) <= {"t", "u"}
            load.complete(len(stream))
            stream += batch.column("value").to_pylist()
        buffer.release_batches(loads)
    return log


def room(buffer: SendBuffer) -> int:
    """So many messages fit in."""
    return next(number for number in itertools.count() if publish(buffer, b"") is None)


@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize(
    ("call", "entire"),
    [
        (lambda buffer: publish(buffer, b"b0"), [{b"b0"}]),
        (publish_all, [{b"b0", b"b1", b"b2"}, {b"b3", b"b4", b"b5"}, {b"b6", b"b7", b"b8"}, {b"b9"}]),
        (lambda buffer: buffer.advance([(1,)]), []),
        (flush, []),
    ],
    ids=["publish", "publish_batch", "advance", "flush"],
)
def test_a_call_that_is_broken_off_is_done_or_not(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[SendBuffer], object], entire: list[set[bytes]], before: int
) -> None:
    """Wherever an exception breaks it off; all else goes on."""
    monkeypatch.setattr(module, "MAX_ROUTED_ROWS", 3)
    monkeypatch.setattr(module, "ADVANCE_PAUSE_S", 0.0)
    ((low, middle), (after, high)) = split_ring(2)
    streams = [StreamCatalogRow(1, 1, 1, low, middle, 0), StreamCatalogRow(2, 1, 1, after, high, 0)]
    routes = PublisherRoutingTable([Space(1, "default", TopicFilter("#"), 2)], streams, None)
    fits = room(SendBuffer(routes, ROOMY))
    for place in itertools.count(1):
        buffer = SendBuffer(routes, ROOMY)
        deliveries = {b"m%d" % number: publish(buffer, b"m%d" % number) for number in range(before)}
        _, broken = run_interrupted(lambda buffer=buffer: call(buffer), place, *WHERE)  # type: ignore[misc]
        deliveries[b"last"] = publish(buffer, b"last")
        log = log_of(buffer)
        if (least := buffer.due_advance([])) is not None:
            buffer.complete_advance(least)
        buffer.flush(0.0)
        there = [value for stream in log.values() for value in stream]
        assert len(set(there)) == len(there), broken
        others = set(there) - deliveries.keys()
        assert others == set().union(*[part for part in entire if part <= others]), broken
        assert broken or others == set().union(*entire)
        for value, delivery in deliveries.items():
            assert delivery is not None, broken
            place_of = delivery.result(0.0)
            assert log[place_of.stream][place_of.offset] == value, broken
        assert room(buffer) == fits, broken
        if not broken:
            break
    assert place > 10


@pytest.mark.parametrize(
    "call",
    [
        lambda buffer: publish(buffer, b"of the handler"),
        publish_all,
        lambda buffer: buffer.advance([(1,)]),
        flush,
        lambda buffer: buffer.close(SubletError("closed")),
    ],
    ids=["publish", "publish_batch", "advance", "flush", "close"],
)
def test_a_handler_makes_no_call_in_the_middle_of_one(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[SendBuffer], object]
) -> None:
    """It would wait for ever for what it interrupts: that raises, and all goes on afterwards."""
    buffer, find_stream = a_buffer(ROOMY), PublisherRoutingTable.find_stream

    def find_stream_interrupted(routes: PublisherRoutingTable, topic: str, key: bytes | None) -> int:
        if topic == "u":
            signal.raise_signal(signal.SIGUSR1)
        return find_stream(routes, topic, key)

    monkeypatch.setattr(PublisherRoutingTable, "find_stream", find_stream_interrupted)
    handler = signal.signal(signal.SIGUSR1, lambda *_: call(buffer))
    try:
        with pytest.raises(UsageError, match="Set a flag in the handler, or raise an exception there"):
            publish(buffer, b"interrupted", "u")
    finally:
        signal.signal(signal.SIGUSR1, handler)
    publish(buffer, b"after")
    assert log_of(buffer) == {1: [b"after"]}
    call(buffer)


def test_room_is_reported_when_there_is_some() -> None:
    """At once where there is, or where nothing is taken any more."""
    buffer = a_buffer(replace(ONE_MESSAGE, buffered_bytes=size_of("t", None, b"", None)))
    called = Counter[str]()

    def ask(name: str) -> Counter[str]:
        buffer.add_room_callback(lambda: called.update([name]))
        return called

    assert ask("empty") == {"empty": 1}
    buffer.add("t", None, b"", None, 0)
    assert ask("full") == {"empty": 1}
    gone = partial(called.update, ["gone"])
    buffer.add_room_callback(gone)
    buffer.remove_room_callback(gone)
    settle(buffer, buffer.take() or [])
    assert called == {"empty": 1, "full": 1}
    buffer.add("t", None, b"", None, 0)
    buffer.close(SubletError("closed"))
    assert ask("closed") == {"empty": 1, "full": 1, "closed": 1}


def test_a_batch_waits_for_room() -> None:
    buffer = a_buffer(replace(ONE_MESSAGE, buffered_bytes=1))
    publish(buffer, b"")
    with ThreadPoolExecutor(1) as pool:
        added = pool.submit(publish_all, buffer)
        try:
            assert wait([added], 0.1).not_done
            settle(buffer, buffer.take() or [])
            added.result(30)
        finally:
            buffer.close(SubletError("closed"))


def test_small_batches_fill_a_block() -> None:
    buffer = a_buffer(ROOMY)
    for _ in range(2):
        buffer.add_batches(to_record_batches({"topic": ["t"] * 2, "value": [b""] * 2}))
    assert [load.to_batch().num_rows for load in buffer.take() or []] == [4]


def test_waiting_for_the_next_block_takes_no_room() -> None:
    """As the parts of a batch do that begin at an odd place in it, each as large as a block."""
    buffer = a_buffer(BufferLimits(100, 1000, 1, buffered_bytes=1, linger_s=0.0))
    buffer.add_batches(to_record_batches({"topic": "t", "value": [b"x" * 600] * 4}))
    log_of(buffer)
    assert publish(buffer, b"") is not None, "nothing is there"


@pytest.mark.parametrize(("messages", "size"), [(2, 1 << 20), (100, 2 * size_of("t", None, b"x" * 500, None))])
def test_a_full_block_wakes_who_lingers(monkeypatch: pytest.MonkeyPatch, messages: int, size: int) -> None:
    buffer = a_buffer(BufferLimits(messages, size, 1, buffered_bytes=1 << 20, linger_s=86_400.0))
    publish(buffer, b"x" * 500)
    lingers = threading.Event()

    def read_clock() -> float:
        lingers.set()  # the sender asks how long to wait, and waits then
        return 0.0

    monkeypatch.setattr(time, "monotonic", read_clock)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(buffer.take)
        try:
            assert lingers.wait(30)
            publish(buffer, b"x" * 500)
            assert taken.result(30)
        finally:
            buffer.close(SubletError("closed"))


def test_epochs_move_to_no_other_space() -> None:
    """They fail by that, alone; what is in none moves, and the failed take no room."""
    ((low, high),) = split_ring(1)
    before, after = ([StreamCatalogRow(each, each, 1, low, high, 0)] for each in (1, 2))
    spaces = [Space(1, "default", TopicFilter("#"), 1), Space(2, "eu", TopicFilter("t"), 1)]
    after.append(replace(before[0], stream_id=3))
    buffer = SendBuffer(PublisherRoutingTable(spaces[:1], before, "default"), ROOMY)
    fits = room(buffer)
    log_of(buffer)
    in_epoch = buffer.add("t", None, b"in an epoch", None, 0, (1,))
    stays = buffer.add("u", None, b"stays", None, 0, (1,))
    publish(buffer, b"plain")
    buffer.reroute(PublisherRoutingTable(spaces, after, "default"), [])
    assert log_of(buffer) == {2: [b"plain"], 3: [b"stays"]}
    assert stays is not None
    assert stays.result(0.0).stream == 3
    assert in_epoch is not None
    with pytest.raises(UsageError, match="topic 't' belongs to space 'eu', and this publisher is for space 'default'"):
        in_epoch.result(0.0)
    buffer.reroute(PublisherRoutingTable(spaces[:1], before, None), [])
    assert room(buffer) == fits


@pytest.mark.parametrize(("epochs", "failed"), [([[1]] * 3, [[0, 2]]), ([None, [1], None], [])])
def test_what_has_no_stream_fails_together(epochs: list[list[int] | None], failed: list[list[int]]) -> None:
    """With the first reason: of many topics each would be a piece of its own."""
    ((low, high),) = split_ring(1)
    spaces = [Space(1, "eu", TopicFilter("eu/#"), 1), Space(2, "us", TopicFilter("us/#"), 1)]
    table = PublisherRoutingTable(spaces, [StreamCatalogRow(each, each, each, low, high, 0) for each in (1, 2)], "eu")
    (batch,) = to_record_batches({"topic": ["us/1", "eu/1", "us/2"], "value": [b""] * 3, "epoch": epochs})
    piece = PendingArrowBatch(batch, range(3), SharedPublishResult(3))
    parts, unroutable = reroute_piece(table, table.without_space_limit(), piece)
    assert sum(part.count for _, part in parts) == 3 - sum(map(len, failed))
    assert [list(part.rows.to_pylist()) for part, _ in unroutable] == failed  # type: ignore[union-attr]
    assert all("'us/1'" in str(error) for _, error in unroutable)


def test_a_closed_buffer_needs_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a database that is away, with nothing to send."""
    monkeypatch.setattr(PublisherRoutingTable, "may_be_outdated", True)
    buffer = a_buffer(ROOMY)
    buffer.request_routes()
    assert buffer.take() == []
    buffer.close(SubletError("closed"))
    assert buffer.take() is None
    buffer.request_routes()
    assert buffer.take() is None


def test_a_flush_ends_the_lingering() -> None:
    buffer = a_buffer(BufferLimits(100, 1 << 20, 1, buffered_bytes=1 << 20, linger_s=86_400.0))
    publish(buffer, b"x")
    with pytest.raises(TimeoutError):
        buffer.flush(0.0)
    taken = queue.SimpleQueue[int]()
    threading.Thread(target=lambda: taken.put(len(buffer.take() or [])), daemon=True).start()
    assert taken.get(timeout=30) == 1


# --- the age of what is taken -----------------------------------------------------------------------------------------


def test_late_messages_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those taken together may fail together: one that was published a minute later has that minute left."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    buffer = a_buffer(BufferLimits(100, 1 << 20, 8, 1 << 20, 0.0))
    for second in (0.0, 0.5, 60.0, 60.5):
        clock[0] = second
        publish(buffer, b"%g" % second)
    taken = []
    while buffer.queued_count:
        loads = buffer.take(AGE_SPREAD_S) or []
        taken.append([value for load in loads for value in load.to_batch().column("value").to_pylist()])
        settle(buffer, loads)
    assert taken == [[b"0", b"0.5"], [b"60", b"60.5"]]


@pytest.mark.parametrize("failed", [False, True])
def test_a_batch_is_as_old_as_its_last_part(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """It may take longer to queue than its timeout is; but where a part has failed, the rest is not tried anew."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module, "MAX_ROUTED_ROWS", 1)
    buffer = a_buffer(ONE_MESSAGE)
    ages: list[float] = []

    def send_for_a_minute() -> None:
        loads = buffer.take()
        assert loads
        ages.append(find_entered_at(loads))
        clock[0] += 60.0
        if failed:
            buffer.fail_batches(loads, SubletError("lost"))
        else:
            settle(buffer, loads)

    def route(routes: PublisherRoutingTable, batch: pa.RecordBatch, rows: Rows) -> list[RoutedRows]:
        if buffer.queued_count:  # the part before
            send_for_a_minute()
        return partition_rows(routes, batch, rows)

    partition_rows = PublisherRoutingTable.partition_rows
    monkeypatch.setattr(PublisherRoutingTable, "partition_rows", route)
    buffer.add_batches(to_record_batches({"topic": "t", "value": [b"1", b"2", b"3"]}))
    send_for_a_minute()
    assert ages == ([0.0, 0.0, 0.0] if failed else [0.0, 60.0, 120.0])
