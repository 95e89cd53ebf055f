"""A plain Python consumer: an iterator of batches.

    with Session("$share/billing/orders/#") as session:
        for batch in session:
            work(batch.table)

Work that ended well is acknowledged and not repeated; work that failed is not acknowledged, and comes again:

- A batch is acknowledged when the next is asked for, and when its loop is left by `break` or `return`; the one that
  `poll` gave last also when `with Session(...)` ends without an exception.
- A loop that is left by an exception (KeyboardInterrupt too) has failed: its batch comes again, first of all, when the
  session is asked on, or else to whoever gets the stream. Where it cannot be seen how a loop was left, it has failed.
- `close()` acknowledges nothing; nor does anything but `ack()` with `auto_ack=False`.
- What an exception in the middle of `poll` (a signal handler's) keeps from being returned the next call gives.

A stream's progress stops before the first batch that was given out and not acknowledged; from there all is given out
again when the stream moves: at least once. One thread uses a session; an agent's thread keeps it in touch.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import psycopg
import pyarrow as pa

from sublet_borrower.agent.event_queue import EventQueue
from sublet_borrower.agent.thread import AgentThread
from sublet_borrower.consumer.arguments import check_arguments
from sublet_borrower.consumer.iterators import Iteration, Loops
from sublet_borrower.consumer.max_poll_interval import Attendance, weakly
from sublet_borrower.consumer.transport import database_transport, node_transport
from sublet_borrower.new_data.head_tracker import HeadPushed, HeadSubscription, HeadTrackerCounters
from sublet_borrower.new_data.monitor import NewDataMonitor
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.atomic_stream import AtomicGrantedStream
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.util.owner_process import OwnerProcess
from sublet_protocol.domain.epochs import GroupFrontier
from sublet_protocol.domain.errors import (
    GrantLost,
    PayloadUnavailable,
    PayloadUnreadable,
    PoisonBlock,
    PositionBeyondHead,
    PositionGone,
    SubscriptionEnded,
    UnknownOutcome,
    UsageError,
)
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.messages import InvalidateReason
from sublet_protocol.pubsub.counters import SubscriberCounters
from sublet_storage.log.log import LogPage
from sublet_storage.readers.epoch_steps import BlockRun, EpochStep

log = logging.getLogger(__name__)

T = TypeVar("T")

OnEpochsConsumed = Callable[[GroupFrontier], None]
"""Is told how far an atomic group has come in a space: once where it is at first, then whenever it has moved on."""

RETRY_INTERVAL_S = 10.0
"""After which a stream whose next payload was unreadable is read again: somebody may have put it right."""

SLOT_RETRY_INTERVAL_S = 1.0
"""After which a stream is read again where the place of its next payload was away."""

MAX_WAIT_S = 0.1
"""So often at least a session that waits looks around: whether a call may begin is not told, but asked."""


class Session:
    """See the module's page.

    `url`: the database (default: SUBLET_DATABASE_URL, else the embedded server of `data_dir`). `nodes`: addresses
    HOST:PORT of leader nodes, instead of looking them up in the database. `name`: a stable name: of two sessions of a
    group under one name the one that was opened last stays, the other ends as `fenced`; where the group has a session
    expiry, a session that comes back within it finds its streams kept. Unless `is_name_stable`, it is only shown to
    operators. `weight`: how much this consumer takes, relative to others. `starting_position`: where a group begins
    that this session is the first to name: `latest`, `earliest`, a time such as `2026-11-21T10:00:00Z` or `offset:N`.
    `max_batch_bytes`: about how large a batch may be. `auto_ack`: acknowledge a batch when the next is asked for; else
    call `batch.ack()`. `transport`: with `nodes` all comes from these and no database is used, nor has it transactions;
    a batch is smaller then. Of a group that is atomic, `whole_epochs` makes each batch as large as it must be to hold
    its stream's messages of whole epochs, and `on_epochs_consumed` is called by `poll` when the group has consumed
    epochs.

    Raises `InvalidSubscription`, `InvalidSetting`, `DatabaseUnreachable`, `SchemaMismatch`, through nodes `Unavailable`
    and `ProtocolMismatch`; while iterating `SubscriptionEnded` when the group will not lend to it any more. A stream
    whose next messages retention has taken ends nothing: a warning says which, its leader takes it back and blocks it
    (or skips what is gone, if the group was created so), and all others go on. So they do where the next block of a
    stream cannot be decoded: that stream is handed back, and blocked or goes on behind the block, as its group was
    created; and where its payload lies outside of Postgres and cannot be had now: it is kept, and tried again.
    """

    def __init__(
        self,
        subscription: str,
        url: str | None = None,
        *,
        nodes: Sequence[str] | None = None,
        name: str | None = None,
        is_name_stable: bool = True,
        weight: float = 1.0,
        starting_position: str = "latest",
        max_batch_bytes: int = 4 * 1024 * 1024,
        auto_ack: bool = True,
        transport: Literal["database", "nodes"] = "database",
        data_dir: Path | str | None = None,
        settings: BorrowerSettings | None = None,
        whole_epochs: bool = False,
        on_epochs_consumed: OnEpochsConsumed | None = None,
    ) -> None:
        check_arguments(
            weight=weight,
            starting_position=starting_position,
            max_batch_bytes=max_batch_bytes,
            nodes=nodes,
            name=name,
            subscription=subscription,
            auto_ack=auto_ack,
            url=url,
            data_dir=data_dir,
            transport=transport,
            whole_epochs=whole_epochs,
            on_epochs_consumed=on_epochs_consumed,
        )
        self.subscription = str(Subscription.parse(subscription))
        self._home = OwnerProcess()
        self.settings = settings or BorrowerSettings.from_env()
        self._auto_ack = auto_ack
        self.loops = Loops()
        self._last: Batch | None = None
        self._again: list[Batch] = []
        self._reading: tuple[GrantedStream, tuple[Any, ...]] | None = None
        self._group: int | None = None
        self._draining = self._leaving = self._over = self._interrupted = False
        self._batch_bytes, self._whole_epochs, self._on_epoch = max_batch_bytes, whole_epochs, on_epochs_consumed
        self._announced: dict[int, GroupFrontier] = {}
        self._drain_by: float | None = None
        self._attendance = Attendance(self.subscription, self.settings.max_poll_interval_s)
        self._handler = self._attendance.handler
        self._inbox = EventQueue(self._handler.apply_update)
        self._follows: dict[int, HeadSubscription] = {}
        with contextlib.ExitStack() as opened:
            if transport == "nodes":
                way = node_transport(opened, nodes or (), max_batch_bytes, self.settings.read_timeout_s)
            else:
                way = database_transport(
                    opened, url, data_dir, nodes, max_batch_bytes, self.settings, weakly(self._group_id)
                )
            self._reader, self._transactions = way.reader, way.transactions
            self._agent = AgentThread(way.discover_nodes, self.settings)
            opened.callback(self._agent.close)
            epoch = way.next_session_epoch() if name is not None and is_name_stable else 0
            if way.subscribe_heads is not None:
                opened.callback(way.subscribe_heads(weakly(self._receive)))
            self._resources = opened.pop_all()
        self._monitor = NewDataMonitor(self._handler, self._heads, self._follow, self._unfollow)
        self._subscribe = partial(
            self._agent.subscribe,
            self.subscription,
            self._inbox,
            weight=weight,
            session=name,
            start=starting_position,
            session_epoch=epoch,
        )
        self._handle = self._subscribe()
        self._attendance.begin(self._agent, self._handle)
        patience_s = self.settings.unsubscribe_timeout_s + self.settings.disconnect_timeout_s
        close = self._resources.close
        self._dropped = weakref.finalize(self, self._attendance.dropped, self._inbox, patience_s, close)
        self._dropped.atexit = False

    # --- for the user -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self._home.is_forked:
            self._acknowledge_last()
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        self.loops.asked_beside(sys._getframe(1))
        return Iteration(self)

    def poll(self, timeout_s: float | None = None) -> Batch | None:
        """The next batch; None once the session is drained or closed, or when the timeout is over.

        Asking acknowledges the batch that it gave before, unless the session has auto_ack off; what a loop over the
        session is at work on is that loop's to acknowledge. A Postgres (or node) that is silent
        in the middle of a read can make it take longer than the timeout, by the setting `read_timeout_s`.
        """
        self._home.check(self.subscription)
        self.loops.asked_beside(sys._getframe(1))
        before = self._last
        try:
            with self._attendance.present():
                if self._attendance.is_over:
                    self._join_again()
                self._acknowledge_last()
                self._last = None
                return self._next(timeout_s)
        except BaseException:
            self._recover(before)
            raise

    def _next(self, timeout_s: float | None) -> Batch | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wait_s = 0.0
        while not self.is_closed:
            self._digest(wait_s if deadline is None else min(wait_s, max(deadline - time.monotonic(), 0.0)))
            self._see_to_epochs()
            looked = self._monitor.wait_s == 0
            if looked:
                self._monitor.poll()
            if self._draining and not self.is_closed and self._may_leave():
                self._leave()
            batch, moved_on = (None, False) if self._leaving else self._read_next()
            if batch is not None:
                if self._agent.may_continue(
                    self._handle, batch.stream_id, batch.grant_id
                ):  # the last thing before a call
                    self._give(batch)
                    return batch
                self._not_given()
                moved_on = False
            if not (moved_on or looked) and self._monitor.poll():
                wait_s = 0.0
                continue
            if self._interrupted or (deadline is not None and time.monotonic() >= deadline):
                self._interrupted = False
                return None
            wait_s = 0.0 if moved_on else min(self._monitor.wait_s, MAX_WAIT_S)
        return None

    def left(self, batch: Batch, *, well: bool) -> None:
        """A loop that was at work on this batch is over with it. It is acknowledged if it ended well, and else given
        out again before anything else. For the iterators of this session."""
        if self._home.is_forked or not self._auto_ack:
            return
        if well:
            self._find_out()
            self._acknowledge(batch)
        else:
            self._fail(batch)

    def wakeup(self) -> None:
        """Let a `poll` that waits, or else the next one, return None if it finds nothing. From any thread."""
        self._home.check(self.subscription)
        self._interrupted = True
        self._inbox.wakeup()

    @contextlib.contextmanager
    def transaction(self, *batches: Batch) -> Iterator[psycopg.Connection[Any]]:
        """A transaction in which the user's output and the progress of these batches of this session are committed
        together. For one batch: `batch.transaction()`, which says more.
        """
        self._home.check(self.subscription)
        if self._transactions is None:
            raise UsageError(
                f"{self.subscription}: a transaction is on the messages' database, and this session goes through nodes."
                " Make it with access to the database, with transport='database'; for sinks of your own "
                "`batch.grant_id` is"
                " the fencing token."
            )
        if not batches:
            raise UsageError("a transaction without a batch has no progress to commit: name the batches it is for.")
        self._transactions.find_out()
        if found := [batch for batch in batches if batch.found]:
            _check_all_found(found, batches)
            with self._transactions.in_vain() as connection:
                yield connection
            for batch in found:
                batch.found = False
            return
        for batch in batches:
            batch.join_transaction(batches)
        try:
            with self._transactions.begin(batches) as connection:
                yield connection
        except GrantLost as lost:
            self._handler.lose(lost.stream_id, lost.grant_id)
            raise
        self._attendance.touch()

    def wait(self, timeout_s: float) -> None:
        """Pause between two calls on one batch, and take notice of what happens: its `lost` is up to date afterwards.

        Raises `SubscriptionEnded`.
        """
        self._home.check(self.subscription)
        deadline = time.monotonic() + timeout_s
        with self._attendance.present():
            while not self.is_closed:
                self._digest(max(deadline - time.monotonic(), 0.0))
                if time.monotonic() >= deadline:
                    return

    def may_continue(self, batch: Batch) -> bool:
        """Whether another user call may begin on this batch now: only while a leader says that the stream is ours."""
        self._home.check(self.subscription)
        return self._agent.may_continue(self._handle, batch.stream_id, batch.grant_id)

    def drain(self) -> None:
        """Finish what was given out, hand everything over, and let the iteration end. From any thread or handler."""
        self._home.check(self.subscription)
        self._draining = True
        self._inbox.wakeup()

    def leave(self) -> None:
        """Begin to hand over now, also in the middle of a batch, and let the iteration end. From any thread.

        A batch acknowledged within the unsubscribe timeout counts; one that is not will be delivered again.
        """
        self.drain()
        self._leave()

    def assignment(self) -> dict[int, int]:
        """{stream: next offset to deliver} of the streams this session holds now."""
        self._home.check(self.subscription)
        return {} if self.is_closed else self._handler.positions()

    def lag(self) -> dict[int, int]:
        """{stream: messages between its progress and its end} of the streams this session holds now and has looked at,
        as they were when it last looked."""
        self._home.check(self.subscription)
        return {} if self.is_closed else self._handler.lags()

    def close(self, *, broken_off: bool = False) -> None:
        """Leave the group and wait until the last progress is durable, within the unsubscribe timeout and a lease.

        Batches not acknowledged are given up: their messages will be delivered again. `broken_off`: they were being
        worked on, and the group's history is to say so; that takes the whole unsubscribe timeout. Closing again has no
        effect, nor has closing in a forked child.
        """
        if self._home.is_forked:
            return
        deadline = time.monotonic() + self.settings.unsubscribe_timeout_s + self.settings.disconnect_timeout_s + 1.0
        self._over = self._over or self._attendance.is_over
        if not self.is_closed:
            if not broken_off:
                self._handler.abandon_outstanding()
            self._leave()
        while not self.is_closed and time.monotonic() < deadline:
            with contextlib.suppress(SubscriptionEnded):
                self._digest(0.1)
        self._over = True
        self._attendance.end()
        self._dropped.detach()
        self._resources.close()

    @property
    def head_counters(self) -> HeadTrackerCounters:
        """How this session has learned of new messages so far: by push, or by looking for them itself."""
        return self._monitor.counters

    @property
    def connections(self) -> dict[str, SubscriberCounters]:
        """{node address: what has happened between it and this session's agent}, of the nodes it talks to."""
        return self._agent.connection_counters()

    @property
    def is_closed(self) -> bool:
        """True once nothing is held and nothing will be."""
        return self._over

    # --- inside -----------------------------------------------------------------------------------------------------

    def _group_id(self) -> int:
        assert self._group is not None, "whoever has a batch was lent its stream by a leader, which has named the group"
        return self._group

    def _acknowledged(self, granted: GrantedStream, ticket: int) -> None:
        self._check_doubt(granted, ticket)
        self._handler.mark_acknowledged(granted, ticket)

    def _progressed(self, granted: GrantedStream, ticket: int, position: int) -> None:
        self._check_doubt(granted, ticket)
        self._handler.mark_progress(granted, ticket, position)

    def _check_doubt(self, granted: GrantedStream, ticket: int) -> None:
        """Whoever acknowledges what is in doubt takes it for done: which is found out first."""
        transactions = self._transactions
        if (
            transactions is not None
            and transactions.is_in_doubt(granted.stream_id, ticket)
            and not transactions.find_out()
        ):
            raise UsageError(
                f"the batch of stream {granted.stream_id} at offset {ticket}: its transaction, whose outcome was "
                "unknown,"
                " was not committed. Do the batch again; to pass its messages over, acknowledge it once more."
            )

    def _join_again(self) -> None:
        """What it had is given up: its user has not come back in time, and is there now."""
        log.warning("%s: its user is back, and it joins its group again", self.subscription)
        self._last = None
        self._again.clear()
        self._follows.clear()
        self._handle = self._subscribe()
        self._attendance.begin(self._agent, self._handle)

    def _acknowledge_last(self) -> None:
        """What was given out last has ended well, unless a loop is at work on it."""
        self._find_out()
        if self._last is not None and not self.loops.has(self._last):
            self._acknowledge(self._last)

    def _acknowledge(self, batch: Batch) -> None:
        """It has ended well, unless a transaction was begun for it and not committed; of one in doubt that is found out
        before."""
        if self._auto_ack and (batch.committed or not batch.began):
            batch.ack()

    def _find_out(self) -> None:
        if self._transactions is not None:
            with contextlib.suppress(UnknownOutcome):
                self._transactions.find_out(0.0)

    def _fail(self, batch: Batch) -> None:
        """It is to be given out again."""
        if batch not in self._again:
            self._again.append(batch)
        if self._last is batch:
            self._last = None

    def _give(self, batch: Batch) -> None:
        """It is in the user's hands when this returns, and nothing breaks `poll` off."""
        self._last = batch
        self._reading = None
        if batch in self._again:
            self._again.remove(batch)

    def _not_given(self) -> None:
        """The right to begin was over when the batch had been read: it is the next of its stream again."""
        if self._reading is not None:  # else it is offered again already
            (granted, place), self._reading = self._reading, None
            self._handler.go_back(granted, place)
            self._handler.release_read(granted)

    def _recover(self, before: Batch | None) -> None:
        """Something has broken `poll` off, an exception out of a signal handler say: what was taken of a stream
        and not given out is given out by the next call. `before`: what had been given out."""
        last, reading = self._last, self._reading
        if last is not None and last is not before:
            self._fail(last)
        elif reading is not None:
            self._handler.go_back(*reading)
        self._reading = None
        self._attendance.leave()
        self._inbox.let_go()
        self._handler.look_again()

    def _offer_again(self) -> Batch | None:
        """What failed, as soon as a user's call may begin on it, if it is still ours to do."""
        for batch in tuple(self._again):
            if not batch.is_outstanding:
                self._again.remove(batch)
            elif not self._is_in_doubt(batch) and self.may_continue(batch):
                return batch
        return None

    def _is_in_doubt(self, batch: Batch) -> bool:
        return self._transactions is not None and self._transactions.is_in_doubt(batch.stream_id, batch.ticket)

    def _may_leave(self) -> bool:
        """Epochs that are given out in part are given out whole before, and again what failed, if that does not take
        too long."""
        if self._drain_by is None:
            self._drain_by = time.monotonic() + self.settings.unsubscribe_timeout_s
        if time.monotonic() >= self._drain_by:
            return True
        return not self._handler.is_mid_step and not any(batch.is_outstanding for batch in self._again)

    def _leave(self) -> None:
        if not self._leaving:
            self._handler.abort_steps()
            self._agent.unsubscribe(self._handle)
            self._leaving = True

    def _digest(self, wait_s: float) -> None:
        for news in self._inbox.take(wait_s):
            if isinstance(news, HeadPushed):
                self._monitor.on_head_pushed(news)
        end = self._inbox.end
        if end is not None and end.handle == self._handle and not (self._over or self._attendance.is_over):
            self._over = True
            if end.reason is not InvalidateReason.DONE:
                raise SubscriptionEnded(self.subscription, end.reason.value, end.detail)

    def _see_to_epochs(self) -> None:
        if self._on_epoch is not None and self._handler.epochs:
            self._announce(self._on_epoch)
        if self._whole_epochs and self._handler.has_non_atomic():
            raise UsageError(
                f"{self.subscription}: whole epochs are asked for, and its group is not atomic. Create it with `sublet "
                "groups create --atomic` before its first consumer comes, or leave whole_epochs out."
            )

    def _announce(self, on_epoch: OnEpochsConsumed) -> None:
        for space_id, found in tuple(self._handler.epochs.items()):
            known = self._announced.get(space_id)
            if known is None or known.consumed != found.consumed:
                on_epoch(found)
                self._announced[space_id] = found

    def _follow(self, follow: HeadSubscription) -> None:
        self._follows[follow.stream_id] = follow
        self._agent.subscribe_head(self._handle, follow)

    def _unfollow(self, follow: HeadSubscription) -> None:
        if self._follows.get(follow.stream_id) == follow:
            del self._follows[follow.stream_id]
        self._agent.unsubscribe_head(self._handle, follow)

    def _receive(self, heads: Mapping[int, int]) -> None:
        """From publishers, on a thread of theirs: as if a node had pushed it."""
        for stream_id, head in heads.items():
            if (follow := self._follows.get(stream_id)) is not None:
                self._inbox.put(HeadPushed(follow, head))

    def _may_start(self, granted: GrantedStream) -> bool:
        """Whether to go on reading. Epochs that are given out in part are also read on while all is handed over."""
        if isinstance(granted, AtomicGrantedStream) and granted.is_mid_step:
            return self._agent.may_continue(self._handle, granted.stream_id, granted.grant_id)
        return not self._draining and self._agent.may_start_call(self._handle, granted.stream_id, granted.grant_id)

    def _heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]:
        if waiting := self._handler.streams_waiting_for_epochs():
            self._handler.update_frontiers(self._reader.fetch_frontiers(granted.stream_id for granted in waiting))
        return self._reader.fetch_heads(stream_ids)

    def _read_next(self) -> tuple[Batch | None, bool]:
        """One page, of the stream whose turn it is: a batch if it has something for this subscription, and whether we
        have moved on in a stream. One page only: what happens meanwhile is looked at before the next."""
        self._handler.retry_deferred(time.monotonic())
        if (again := self._offer_again()) is not None:
            return again, True
        granted = self._handler.next_readable(self._may_start)
        if granted is None:
            return None, False
        self._reading = granted, granted.place()
        batch, moved_on = self._read(granted)
        if batch is None:
            self._reading = None
        return batch, moved_on

    def _read(self, granted: GrantedStream) -> tuple[Batch | None, bool]:
        if isinstance(granted, AtomicGrantedStream):
            return self._read_atomic(granted)
        first = granted.next_read_offset
        try:
            page = self._page(granted)
        finally:
            self._handler.release_read(granted)
        if page is None:
            return None, granted.is_unreadable
        if not page.batches:
            self._handler.mark_skipped(granted, first)
            return None, True
        self._group = self._agent.group_id(self._handle) or self._group
        table = pa.Table.from_batches(page.batches)
        self._handler.mark_delivered(granted, table.nbytes)
        acknowledged, progressed = self._acknowledged, self._progressed
        return Batch(table, first, page.position, granted, acknowledged, progressed, self.transaction), True

    def _read_atomic(self, granted: AtomicGrantedStream) -> tuple[Batch | None, bool]:
        """The same of a stream that is read in whole epochs."""
        moved_on, piece = False, granted.next_rows()
        try:
            if piece is None:
                moved_on = (
                    self._look(granted) if granted.next_run is None else self._read_on(granted, *granted.next_run)
                )
                piece = granted.next_rows()
        finally:
            self._handler.release_read(granted)
        if piece is None:
            return None, moved_on
        found, place = piece
        self._group = self._agent.group_id(self._handle) or self._group
        self._handler.mark_delivered(granted, found.table.nbytes)
        acknowledged, transact = self._acknowledged, self.transaction
        batch = Batch(found.table, found.first, found.end, granted, acknowledged, None, transact, found.ticket, place)
        return batch, True

    def _read_on(self, granted: AtomicGrantedStream, step: EpochStep, run: BlockRun) -> bool:
        """A page of the step that has begun."""
        page = self._page(granted)
        if page is None:
            return granted.is_unreadable
        if not granted.add_page(page, step, run, atomic=self._whole_epochs):
            self._handler.mark_skipped(granted, granted.ticket)
        return True

    def _look(self, granted: AtomicGrantedStream) -> bool:
        """See what is completed of what follows; True unless it is to be looked at again later: the next stream's turn
        has come."""
        known = granted.step_planner.scanned
        begun = granted.begin_step(self._batch_bytes)
        if not begun:
            marks = self._readable(granted, lambda: self._reader.fetch_block_summaries(granted))
            if marks is None:
                return granted.is_unreadable
            granted.add_summaries(marks)
            begun = granted.begin_step(self._batch_bytes)
        if begun:
            self._handler.report(granted)
        return begun or granted.step_planner.scanned > known or not granted.may_have_more

    def _page(self, granted: GrantedStream) -> LogPage | None:
        return self._readable(granted, lambda: self._reader.fetch(granted, self._may_start))

    def _readable(self, granted: GrantedStream, read: Callable[[], T | None]) -> T | None:
        """What follows in the stream. One that cannot be read on from there is left to its leader, and said once; one
        that may be put right is tried again."""
        try:
            found = read()
        except PoisonBlock as problem:
            if self._handler.poisoned(granted, problem):
                log.warning("%s: %s All other streams go on.", self.subscription, problem)
            return None
        except PayloadUnreadable as problem:
            self._try_later(granted, problem, RETRY_INTERVAL_S)
            return None
        except PayloadUnavailable as problem:
            self._try_later(granted, problem, SLOT_RETRY_INTERVAL_S)
            return None
        except (PositionGone, PositionBeyondHead) as problem:
            granted.is_unreadable = True
            log.warning(
                "%s: %s Nothing more is read of this stream unless its group moves past that; all others go on.",
                self.subscription,
                problem,
            )
            return None
        if found is not None and self._handler.mark_readable(granted):
            log.info("%s: stream %d can be read again", self.subscription, granted.stream_id)
        return found

    def _try_later(self, granted: GrantedStream, problem: Exception, after_s: float) -> None:
        """Said once; also of a place that many streams wait for."""
        if self._handler.defer(granted, problem, time.monotonic(), after_s):
            log.warning("%s: %s All other streams go on.", self.subscription, problem)


def _check_all_found(found: Sequence[Batch], batches: Sequence[Batch]) -> None:
    rest = [batch for batch in batches if batch not in found]
    if rest:
        raise UsageError(
            f"the transaction whose outcome was unknown was committed: {', '.join(map(repr, found))} is done with it. "
            f"Do the rest in a transaction without that: {', '.join(map(repr, rest))}."
        )
