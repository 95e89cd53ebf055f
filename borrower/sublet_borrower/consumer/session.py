"""A plain Python consumer: an iterator of batches.

    with Session("$share/billing/orders/#") as session:
        for batch in session:
            work(batch.table)

Work that ended well is acknowledged and not repeated; work that failed is not acknowledged, and comes again:

- A batch is acknowledged when the next is asked for, and when its loop is left by `break` or `return`; the one that
  `next_batch` gave last also when `with Session(...)` ends without an exception.
- A loop that is left by an exception (KeyboardInterrupt too) has failed: its batch comes again, first of all, when the
  session is asked on, or else to whoever gets the stream. Where it cannot be seen how a loop was left, it has failed.
- `close()` acknowledges nothing; nor does anything but `ack()` with `auto_ack=False`.
- What an exception in the middle of `next_batch` (a signal handler's) keeps from being returned the next call gives.

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
from typing import Any, Self, TypeVar

import psycopg
import pyarrow as pa

from sublet_borrower.agent.event_queue import Inbox
from sublet_borrower.agent.thread import AgentThread
from sublet_borrower.consumer.arguments import check_arguments
from sublet_borrower.consumer.iterators import Iteration, Loops
from sublet_borrower.consumer.max_poll_interval import Attendance, weakly
from sublet_borrower.consumer.transport import by_database, by_nodes
from sublet_borrower.new_data.head_tracker import FollowId, NewsCounters, Pushed
from sublet_borrower.new_data.monitor import Lookout
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.atomic_stream import WholeLent
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.granted_stream import Lent
from sublet_borrower.util.owner_process import Home
from sublet_protocol.domain.epochs import GroupFrontier
from sublet_protocol.domain.errors import (
    BeyondHead,
    Gone,
    GrantLost,
    PayloadUnavailable,
    PayloadUnreadable,
    PoisonBlock,
    SubscriptionEnded,
    UnknownOutcome,
    UsageError,
)
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.messages import EndReason
from sublet_protocol.pubsub.counters import SubscriberCounters
from sublet_storage.log.log import Page
from sublet_storage.readers.epoch_steps import Run, Step

log = logging.getLogger(__name__)

T = TypeVar("T")

OnEpoch = Callable[[GroupFrontier], None]
"""Is told how far an atomic group has come in a space: once where it is at first, then whenever it has moved on."""

AGAIN_S = 10.0
"""After which a stream whose next payload was unreadable is read again: somebody may have put it right."""

PLACE_AGAIN_S = 1.0
"""After which a stream is read again where the place of its next payload was away."""

LONGEST_WAIT_S = 0.1
"""So often at least a session that waits looks around: whether a call may begin is not told, but asked."""


class Session:
    """See the module's page.

    `url`: the database (default: SUBLET_DATABASE_URL, else the embedded server of `data_dir`). `nodes`: addresses
    HOST:PORT of leader nodes, instead of looking them up in the database. `name`: a stable name: of two sessions of a
    group under one name the one that was opened last stays, the other ends as `fenced`; where the group has a session
    expiry, a session that comes back within it finds its streams kept. Unless `stable`, it is only shown to operators.
    `weight`: how much this consumer takes, relative to others. `start`: where a group begins that this session is the
    first to name: `latest`, `earliest`, a time such as `2026-11-21T10:00:00Z` or `offset:N`. `batch_bytes`: about how
    large a batch may be. `auto_ack`: acknowledge a batch when the next is asked for; else call `batch.ack()`.
    `through_nodes`: all comes from `nodes` and no database is used, nor has it transactions; a batch is smaller then.
    Of a group that is atomic, `whole_epochs` makes each batch as large as it must be to hold its stream's messages of
    whole epochs, and `on_epoch` is called by `next_batch` when the group has consumed epochs.

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
        stable: bool = True,
        weight: float = 1.0,
        start: str = "latest",
        batch_bytes: int = 4 * 1024 * 1024,
        auto_ack: bool = True,
        through_nodes: bool = False,
        data_dir: Path | str | None = None,
        settings: BorrowerSettings | None = None,
        whole_epochs: bool = False,
        on_epoch: OnEpoch | None = None,
    ) -> None:
        check_arguments(
            weight=weight,
            start=start,
            batch_bytes=batch_bytes,
            nodes=nodes,
            name=name,
            subscription=subscription,
            auto_ack=auto_ack,
            url=url,
            data_dir=data_dir,
            through_nodes=through_nodes,
            whole_epochs=whole_epochs,
            on_epoch=on_epoch,
        )
        self.subscription = str(Subscription.parse(subscription))
        self._home = Home()
        self.settings = settings or BorrowerSettings.from_env()
        self._auto_ack = auto_ack
        self.loops = Loops()
        self._last: Batch | None = None
        self._again: list[Batch] = []
        self._reading: tuple[Lent, tuple[Any, ...]] | None = None
        self._group: int | None = None
        self._draining = self._leaving = self._over = self._interrupted = False
        self._batch_bytes, self._whole_epochs, self._on_epoch = batch_bytes, whole_epochs, on_epoch
        self._announced: dict[int, GroupFrontier] = {}
        self._drain_by: float | None = None
        self._attendance = Attendance(self.subscription, self.settings.max_poll_interval_s)
        self._handler = self._attendance.handler
        self._inbox = Inbox(self._handler.take)
        self._follows: dict[int, FollowId] = {}
        with contextlib.ExitStack() as opened:
            if through_nodes:
                way = by_nodes(opened, nodes or (), batch_bytes, self.settings.read_timeout_s)
            else:
                way = by_database(opened, url, data_dir, nodes, batch_bytes, self.settings, weakly(self._group_id))
            self._reader, self._transactions = way.reader, way.transactions
            self._agent = AgentThread(way.find_nodes, self.settings)
            opened.callback(self._agent.close)
            epoch = way.draw_epoch() if name is not None and stable else 0
            if way.hear is not None:
                opened.callback(way.hear(weakly(self._hear)))
            self._resources = opened.pop_all()
        self._lookout = Lookout(self._handler, self._heads, self._follow, self._unfollow)
        self._subscribe = partial(
            self._agent.subscribe,
            self.subscription,
            self._inbox,
            weight=weight,
            session=name,
            start=start,
            session_epoch=epoch,
        )
        self._handle = self._subscribe()
        self._attendance.begin(self._agent, self._handle)
        patience_s = self.settings.unsubscribe_timeout_s + self.settings.farewell_s
        close = self._resources.close
        self._dropped = weakref.finalize(self, self._attendance.dropped, self._inbox, patience_s, close)
        self._dropped.atexit = False

    # --- for the user -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self._home.is_elsewhere:
            self._acknowledge_last()
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        self.loops.asked_beside(sys._getframe(1))
        return Iteration(self)

    def next_batch(self, timeout_s: float | None = None) -> Batch | None:
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
        while not self.closed:
            self._digest(wait_s if deadline is None else min(wait_s, max(deadline - time.monotonic(), 0.0)))
            self._see_to_epochs()
            looked = self._lookout.wait_s == 0
            if looked:
                self._lookout.look()
            if self._draining and not self.closed and self._may_leave():
                self._leave()
            batch, moved_on = (None, False) if self._leaving else self._read_next()
            if batch is not None:
                if self._agent.may_go_on(self._handle, batch.stream_id, batch.grant_id):  # the last thing before a call
                    self._give(batch)
                    return batch
                self._not_given()
                moved_on = False
            if not (moved_on or looked) and self._lookout.look():
                wait_s = 0.0
                continue
            if self._interrupted or (deadline is not None and time.monotonic() >= deadline):
                self._interrupted = False
                return None
            wait_s = 0.0 if moved_on else min(self._lookout.wait_s, LONGEST_WAIT_S)
        return None

    def left(self, batch: Batch, *, well: bool) -> None:
        """A loop that was at work on this batch is over with it. It is acknowledged if it ended well, and else given
        out again before anything else. For the iterators of this session."""
        if self._home.is_elsewhere or not self._auto_ack:
            return
        if well:
            self._acknowledge(batch)
        else:
            self._fail(batch)

    def interrupt(self) -> None:
        """Let a `next_batch` that waits, or else the next one, return None if it finds nothing. From any thread."""
        self._home.check(self.subscription)
        self._interrupted = True
        self._inbox.wake()

    @contextlib.contextmanager
    def transaction(self, *batches: Batch) -> Iterator[psycopg.Connection[Any]]:
        """A transaction in which the user's output and the progress of these batches of this session are committed
        together. For one batch: `batch.transaction()`, which says more.
        """
        self._home.check(self.subscription)
        if self._transactions is None:
            raise UsageError(
                f"{self.subscription}: a transaction is on the messages' database, and this session goes through nodes."
                " Make it with access to the database, without through_nodes; for sinks of your own `batch.grant_id` is"
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
            batch.begin(batches)
        try:
            with self._transactions.over(batches) as connection:
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
            while not self.closed:
                self._digest(max(deadline - time.monotonic(), 0.0))
                if time.monotonic() >= deadline:
                    return

    def may_go_on(self, batch: Batch) -> bool:
        """Whether another user call may begin on this batch now: only while a leader says that the stream is ours."""
        self._home.check(self.subscription)
        return self._agent.may_go_on(self._handle, batch.stream_id, batch.grant_id)

    def drain(self) -> None:
        """Finish what was given out, hand everything over, and let the iteration end. From any thread or handler."""
        self._home.check(self.subscription)
        self._draining = True
        self._inbox.wake()

    def leave(self) -> None:
        """Begin to hand over now, also in the middle of a batch, and let the iteration end. From any thread.

        A batch acknowledged within the unsubscribe timeout counts; one that is not will be delivered again.
        """
        self.drain()
        self._leave()

    def held(self) -> dict[int, int]:
        """{stream: next offset to deliver} of the streams this session holds now."""
        self._home.check(self.subscription)
        return {} if self.closed else self._handler.streams()

    def lags(self) -> dict[int, int]:
        """{stream: messages between its progress and its end} of the streams this session holds now and has looked at,
        as they were when it last looked."""
        self._home.check(self.subscription)
        return {} if self.closed else self._handler.lags()

    def close(self, *, broken_off: bool = False) -> None:
        """Leave the group and wait until the last progress is durable, within the unsubscribe timeout and a lease.

        Batches not acknowledged are given up: their messages will be delivered again. `broken_off`: they were being
        worked on, and the group's history is to say so; that takes the whole unsubscribe timeout. Closing again has no
        effect, nor has closing in a forked child.
        """
        if self._home.is_elsewhere:
            return
        deadline = time.monotonic() + self.settings.unsubscribe_timeout_s + self.settings.farewell_s + 1.0
        self._over = self._over or self._attendance.is_over
        if not self.closed:
            if not broken_off:
                self._handler.give_up()
            self._leave()
        while not self.closed and time.monotonic() < deadline:
            with contextlib.suppress(SubscriptionEnded):
                self._digest(0.1)
        self._over = True
        self._attendance.end()
        self._dropped.detach()
        self._resources.close()

    @property
    def news(self) -> NewsCounters:
        """How this session has learned of new messages so far: by push, or by looking for them itself."""
        return self._lookout.counters

    @property
    def connections(self) -> dict[str, SubscriberCounters]:
        """{node address: what has happened between it and this session's agent}, of the nodes it talks to."""
        return self._agent.connections()

    @property
    def closed(self) -> bool:
        """True once nothing is held and nothing will be."""
        return self._over

    # --- inside -----------------------------------------------------------------------------------------------------

    def _group_id(self) -> int:
        assert self._group is not None, "whoever has a batch was lent its stream by a leader, which has named the group"
        return self._group

    def _acknowledged(self, lent: Lent, ticket: int) -> None:
        self._check_doubt(lent, ticket)
        self._handler.acknowledged(lent, ticket)

    def _progressed(self, lent: Lent, ticket: int, position: int) -> None:
        self._check_doubt(lent, ticket)
        self._handler.progressed(lent, ticket, position)

    def _check_doubt(self, lent: Lent, ticket: int) -> None:
        """Whoever acknowledges what is in doubt takes it for done: which is found out first."""
        transactions = self._transactions
        if (
            transactions is not None
            and transactions.is_in_doubt(lent.stream_id, ticket)
            and not transactions.find_out()
        ):
            raise UsageError(
                f"the batch of stream {lent.stream_id} at offset {ticket}: its transaction, whose outcome was unknown,"
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
        """It has ended well, unless a transaction was begun for it and not committed."""
        self._find_out()
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
        """It is in the user's hands when this returns, and nothing breaks `next_batch` off."""
        self._last = batch
        self._reading = None
        if batch in self._again:
            self._again.remove(batch)

    def _not_given(self) -> None:
        """The right to begin was over when the batch had been read: it is the next of its stream again."""
        if self._reading is not None:  # else it is offered again already
            (lent, place), self._reading = self._reading, None
            self._handler.go_back(lent, place)
            self._handler.not_read(lent)

    def _recover(self, before: Batch | None) -> None:
        """Something has broken `next_batch` off, an exception out of a signal handler say: what was taken of a stream
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
            elif not self._is_in_doubt(batch) and self.may_go_on(batch):
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
        return not self._handler.is_within_a_step and not any(batch.is_outstanding for batch in self._again)

    def _leave(self) -> None:
        if not self._leaving:
            self._handler.cut_short()
            self._agent.unsubscribe(self._handle)
            self._leaving = True

    def _digest(self, wait_s: float) -> None:
        for news in self._inbox.take(wait_s):
            if isinstance(news, Pushed):
                self._lookout.pushed(news)
        end = self._inbox.end
        if end is not None and end.handle == self._handle and not (self._over or self._attendance.is_over):
            self._over = True
            if end.reason is not EndReason.DONE:
                raise SubscriptionEnded(self.subscription, end.reason.value, end.detail)

    def _see_to_epochs(self) -> None:
        if self._on_epoch is not None and self._handler.epochs:
            self._announce(self._on_epoch)
        if self._whole_epochs and self._handler.has_plain():
            raise UsageError(
                f"{self.subscription}: whole epochs are asked for, and its group is not atomic. Create it with `sublet "
                "groups create --atomic` before its first consumer comes, or leave whole_epochs out."
            )

    def _announce(self, on_epoch: OnEpoch) -> None:
        for space_id, found in tuple(self._handler.epochs.items()):
            known = self._announced.get(space_id)
            if known is None or known.consumed != found.consumed:
                on_epoch(found)
                self._announced[space_id] = found

    def _follow(self, follow: FollowId) -> None:
        self._follows[follow.stream_id] = follow
        self._agent.follow(self._handle, follow)

    def _unfollow(self, follow: FollowId) -> None:
        if self._follows.get(follow.stream_id) == follow:
            del self._follows[follow.stream_id]
        self._agent.unfollow(self._handle, follow)

    def _hear(self, heads: Mapping[int, int]) -> None:
        """From publishers, on a thread of theirs: as if a node had pushed it."""
        for stream_id, head in heads.items():
            if (follow := self._follows.get(stream_id)) is not None:
                self._inbox.put(Pushed(follow, head))

    def _may_start(self, lent: Lent) -> bool:
        """Whether to go on reading. Epochs that are given out in part are also read on while all is handed over."""
        if isinstance(lent, WholeLent) and lent.is_within_a_step:
            return self._agent.may_go_on(self._handle, lent.stream_id, lent.grant_id)
        return not self._draining and self._agent.may_start(self._handle, lent.stream_id, lent.grant_id)

    def _heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]:
        if waiting := self._handler.waiting():
            self._handler.note_completed(self._reader.completed(lent.stream_id for lent in waiting))
        return self._reader.heads(stream_ids)

    def _read_next(self) -> tuple[Batch | None, bool]:
        """One page, of the stream whose turn it is: a batch if it has something for this subscription, and whether we
        have moved on in a stream. One page only: what happens meanwhile is looked at before the next."""
        self._handler.try_again(time.monotonic())
        if (again := self._offer_again()) is not None:
            return again, True
        lent = self._handler.next_to_read(self._may_start)
        if lent is None:
            return None, False
        self._reading = lent, lent.place()
        batch, moved_on = self._read(lent)
        if batch is None:
            self._reading = None
        return batch, moved_on

    def _read(self, lent: Lent) -> tuple[Batch | None, bool]:
        if isinstance(lent, WholeLent):
            return self._read_whole(lent)
        first = lent.read
        try:
            page = self._page(lent)
        finally:
            self._handler.not_read(lent)
        if page is None:
            return None, lent.unreadable
        if not page.batches:
            self._handler.skipped(lent, first)
            return None, True
        self._group = self._agent.group_id(self._handle) or self._group
        table = pa.Table.from_batches(page.batches)
        self._handler.given(lent, table.nbytes)
        acknowledged, progressed = self._acknowledged, self._progressed
        return Batch(table, first, page.position, lent, acknowledged, progressed, self.transaction), True

    def _read_whole(self, lent: WholeLent) -> tuple[Batch | None, bool]:
        """The same of a stream that is read in whole epochs."""
        moved_on, piece = False, lent.next_piece()
        try:
            if piece is None:
                moved_on = self._look(lent) if lent.run is None else self._read_on(lent, *lent.run)
                piece = lent.next_piece()
        finally:
            self._handler.not_read(lent)
        if piece is None:
            return None, moved_on
        found, place = piece
        self._group = self._agent.group_id(self._handle) or self._group
        self._handler.given(lent, found.table.nbytes)
        acknowledged, transact = self._acknowledged, self.transaction
        batch = Batch(found.table, found.first, found.end, lent, acknowledged, None, transact, found.ticket, place)
        return batch, True

    def _read_on(self, lent: WholeLent, step: Step, run: Run) -> bool:
        """A page of the step that has begun."""
        page = self._page(lent)
        if page is None:
            return lent.unreadable
        if not lent.offer(page, step, run, whole=self._whole_epochs):
            self._handler.skipped(lent, lent.ticket)
        return True

    def _look(self, lent: WholeLent) -> bool:
        """See what is completed of what follows; True unless it is to be looked at again later: the next stream's turn
        has come."""
        known = lent.plan.scanned
        begun = lent.go_on(self._batch_bytes)
        if not begun:
            marks = self._readable(lent, lambda: self._reader.marks(lent))
            if marks is None:
                return lent.unreadable
            lent.look(marks)
            begun = lent.go_on(self._batch_bytes)
        if begun:
            self._handler.moved(lent)
        return begun or lent.plan.scanned > known or not lent.may_have_more

    def _page(self, lent: Lent) -> Page | None:
        return self._readable(lent, lambda: self._reader.page(lent, self._may_start))

    def _readable(self, lent: Lent, read: Callable[[], T | None]) -> T | None:
        """What follows in the stream. One that cannot be read on from there is left to its leader, and said once; one
        that may be put right is tried again."""
        try:
            found = read()
        except PoisonBlock as problem:
            if self._handler.poisoned(lent, problem):
                log.warning("%s: %s All other streams go on.", self.subscription, problem)
            return None
        except PayloadUnreadable as problem:
            self._try_later(lent, problem, AGAIN_S)
            return None
        except PayloadUnavailable as problem:
            self._try_later(lent, problem, PLACE_AGAIN_S)
            return None
        except (Gone, BeyondHead) as problem:
            lent.unreadable = True
            log.warning(
                "%s: %s Nothing more is read of this stream unless its group moves past that; all others go on.",
                self.subscription,
                problem,
            )
            return None
        if found is not None and self._handler.read_again(lent):
            log.info("%s: stream %d can be read again", self.subscription, lent.stream_id)
        return found

    def _try_later(self, lent: Lent, problem: Exception, after_s: float) -> None:
        """Said once; also of a place that many streams wait for."""
        if self._handler.try_later(lent, problem, time.monotonic(), after_s):
            log.warning("%s: %s All other streams go on.", self.subscription, problem)


def _check_all_found(found: Sequence[Batch], batches: Sequence[Batch]) -> None:
    rest = [batch for batch in batches if batch not in found]
    if rest:
        raise UsageError(
            f"the transaction whose outcome was unknown was committed: {', '.join(map(repr, found))} is done with it. "
            f"Do the rest in a transaction without that: {', '.join(map(repr, rest))}."
        )
