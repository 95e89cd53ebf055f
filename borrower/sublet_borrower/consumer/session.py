"""A plain Python consumer: an iterator of batches.

    with Session("$share/billing/orders/#") as session:
        for batch in session:
            work(batch.table)

Work that ended well is acknowledged and not repeated; work that failed is not acknowledged, and comes again:

- A batch is acknowledged when the next is polled, and when its loop is left by `break` or `return`; the one that
  `poll` returned last also when `with Session(...)` ends without an exception.
- A loop that is left by an exception (KeyboardInterrupt too) has failed: its batch comes again, without what is done of
  it, first of all, when the session is polled, or else to the next holder. Where it cannot be seen how a loop was left,
  it has failed.
- The same holds for a function that iterates, as in `list(map(work, session))`; `next` called by hand is like `poll`.
- `close()` acknowledges nothing; nor does anything but `ack()` with `auto_ack=False`.
- A batch that an exception in the middle of `poll` (a signal handler's) kept back is returned by the next call.

A stream's progress stops before the first batch that was given out and not acknowledged; from there all is given out
again when the stream moves: at least once. One thread at a time uses a session: `poll`, `wait` and `transaction` raise
`UsageError` in the middle of another's call. An agent's thread keeps it in touch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psycopg

from sublet_borrower.consumer.arguments import check_arguments
from sublet_borrower.consumer.database_or_node_access import DatabaseOrNodeAccess, database_transport, node_transport
from sublet_borrower.consumer.group_membership import GroupMembership
from sublet_borrower.consumer.iterators import SessionIterations, SessionIterator
from sublet_borrower.consumer.max_poll_interval import PollMonitor
from sublet_borrower.consumer.next_batch_reader import NextBatchReader
from sublet_borrower.consumer.redelivery_queue import RedeliveryQueue
from sublet_borrower.consumer.transaction import RESOLVE_INTERVAL_S, ProgressTransactions
from sublet_borrower.fetch.stream_fetcher import fetch_heads_and_frontiers
from sublet_borrower.new_data.head_poll_scheduler import NewHeadCounters
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_protocol.domain.epoch_frontiers import GroupFrontier
from sublet_protocol.domain.errors import GrantLost, UsageError
from sublet_protocol.pubsub.counters import AgentSideCounters
from sublet_storage.util.fork_guard import DropMonitor, describe_origin
from sublet_storage.util.timeouts import check_timeout

log = logging.getLogger(__name__)

OnEpochsConsumed = Callable[[GroupFrontier], None]
"""Called with the progress of an atomic group in a space: once with the first, then whenever it has moved on."""

MAX_WAIT_S = 0.1
"""The longest pause of a session that waits: whether a call may begin is not pushed, but checked."""


class Session:
    """A consumer of a shared subscription; see the module's docstring.

    `url`: the database (default: SUBLET_DATABASE_URL, else the embedded server of `data_dir`). `nodes`: addresses
    HOST:PORT of leader nodes, instead of looking them up in the database. `name`: a stable name: of two sessions of a
    group under one name the one that was opened last stays, the other ends as `fenced`; where the group has a session
    expiry, a session that comes back within it finds its streams reserved. Unless `is_name_stable`, it is only shown to
    operators. `weight`: how much this consumer takes, relative to others. `starting_position`: where a group begins
    that this session is the first to name: `latest`, `earliest`, a time such as `2026-11-21T10:00:00Z` or `offset:N`.
    `max_batch_bytes`: about how large a batch may be. `auto_ack`: acknowledge a batch when the next is polled; else
    call `batch.ack()`. `transport`: with `nodes` all comes from these and no database is used, nor has it transactions;
    a batch is smaller then. Of a group that is atomic, `whole_epochs` makes each batch as large as it must be to hold
    its stream's messages of whole epochs, and `on_epochs_consumed` is called by `poll` when the group has consumed
    epochs.

    Raises `InvalidSubscription`, `InvalidSetting`, `DatabaseUnreachable`, `SchemaMismatch`, through nodes `Unavailable`
    and `ProtocolMismatch`; while iterating `SubscriptionEnded` when the group will not grant to it any more. A stream
    whose next messages retention has taken ends nothing: a warning names it, its leader takes it back and blocks it
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
            settings=settings,
        )
        settings = settings or BorrowerSettings.from_env()
        timeout_s = settings.read_timeout_s

        def open_transport(opened: contextlib.ExitStack) -> DatabaseOrNodeAccess:
            if transport == "nodes":
                return node_transport(opened, nodes or (), max_batch_bytes, timeout_s)
            return database_transport(opened, url, data_dir, nodes, max_batch_bytes, timeout_s, listens=True)

        self.loops = SessionIterations()
        self._auto_ack, self._whole_epochs, self._on_epochs_consumed = auto_ack, whole_epochs, on_epochs_consumed
        self._last: Batch | None = None
        self._is_woken = False
        self._drain_deadline: float | None = None
        self._announced: dict[int, GroupFrontier] = {}
        self._member = GroupMembership(
            subscription,
            SessionAssignment,
            open_transport,
            settings,
            name=name,
            is_name_stable=is_name_stable,
            weight=weight,
            starting_position=starting_position,
            fetch_heads=fetch_heads_and_frontiers,
        )
        try:
            self.subscription, self._assignment = self._member.subscription, self._member.assignment
            self._failed = RedeliveryQueue(self.subscription)
            self._transactions = ProgressTransactions(
                self._member.url, self._member.granting_group_id, settings.max_poll_interval_s
            )
            self._batch_reader = NextBatchReader(
                self._member, self._transactions, self._failed, max_batch_bytes, whole_epochs=whole_epochs
            )
            self._member.resources.callback(self._transactions.close)
            self._poll_monitor = PollMonitor(self._member)
            self._member.resources.callback(self._poll_monitor.stop)
            origin, consequence = describe_origin(f"a Session of {self.subscription}"), "what it had is given to others"
            self._drop_monitor = DropMonitor(self._member.owner, origin, consequence, self._poll_monitor.end_dropped)
            self._member.resources.callback(self._drop_monitor.stop)
            self._member.join()
            self._poll_monitor.start()
            self._drop_monitor.start(self)
        except BaseException:  # nobody else could close what it has opened
            self._member.close(0.0)
            raise

    # --- for the user -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self._member.owner.is_forked:
            self._acknowledge_last()
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        self.loops.on_poll_elsewhere(frame := sys._getframe(1))
        return SessionIterator(self, frame)

    def poll(self, timeout_s: float | None = None) -> Batch | None:
        """Return the next batch; None once the session is drained or closed, or when the timeout is over.

        The call acknowledges the batch returned before, unless the session has auto_ack off; a batch that a loop over
        the session is processing is acknowledged by that loop. A Postgres (or node) that is silent in the middle of a
        read can make it take longer than the timeout, by the setting `read_timeout_s`.
        """
        self._member.check_owner()
        timeout_s = check_timeout(timeout_s)
        self.loops.on_poll_elsewhere(sys._getframe(1))
        return self.fetch_batch(timeout_s)

    def fetch_batch(self, timeout_s: float | None = None) -> Batch | None:
        """Return the next batch as `poll` does, without notifying loops. For `AsyncSession`, which polls elsewhere."""
        self._poll_monitor.check_thread()
        previous_batch = self._last
        try:
            with self._poll_monitor.user_call():
                self._acknowledge_last()
                self._last = None
                return self._poll_until(timeout_s)
        except BaseException:
            self._recover(previous_batch)
            raise

    def _poll_until(self, timeout_s: float | None) -> Batch | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wait_s = 0.0
        while not self.is_closed:
            if self._member.is_given_up:  # before this call, as it began, or while it called a function of the user's
                self._join_again()
            self._transactions.resolve(RESOLVE_INTERVAL_S)
            self._member.receive(wait_s if deadline is None else min(wait_s, max(deadline - time.monotonic(), 0.0)))
            self._check_epochs()
            has_polled = self._member.monitor.wait_s == 0
            if has_polled:
                self._member.monitor.poll()
            if self._batch_reader.is_draining and self._is_drained():
                self._leave()
            batch, has_moved = None, False
            if not self._member.is_leaving:
                batch, has_moved = self._batch_reader.read_next(self.transaction)
            if batch is not None:
                if self.may_continue(batch):  # the last thing before a call
                    self._mark_given(batch)
                    return batch
                self._batch_reader.undo()
                has_moved = False
            if not (has_moved or has_polled) and self._member.monitor.poll():
                wait_s = 0.0
                continue
            if self._is_woken or (deadline is not None and time.monotonic() >= deadline):
                self._is_woken = False
                return None
            wait_s = 0.0 if has_moved else min(self._member.monitor.wait_s, MAX_WAIT_S)
        return None

    def left(self, batch: Batch, *, well: bool) -> None:
        """Note that a loop is over with this batch: acknowledge it if it ended well, else give it out again before
        anything else. For the iterators of this session."""
        self.loops.release(batch)
        if self._member.owner.is_forked or not self._auto_ack:
            return
        if well:
            self._transactions.resolve()
            self._acknowledge(batch)
        else:
            self._fail(batch)

    def may_start(self, batch: Batch) -> bool:
        """Return whether a batch that `poll` has returned, and that its user has not received, may still be given out:
        it is to be done, and nothing of its stream comes before it. For `AsyncSession`, from any thread."""
        self._member.check_owner()
        return batch.is_outstanding and not self._failed.has_earlier(batch) and self._batch_reader.may_redeliver(batch)

    def give_back(self, batch: Batch) -> None:
        """Have a later `poll` return the batch, in its turn, as its user has not received it. For `AsyncSession`."""
        self._failed.add(batch)
        if self._last is batch:
            self._last = None

    def wakeup(self) -> None:
        """Let a `poll` that waits, or else the next one, return None if it finds nothing. From any thread."""
        self._member.check_owner()
        self._is_woken = True
        self._member.events.wakeup()

    @contextlib.contextmanager
    def transaction(self, *batches: Batch) -> Iterator[psycopg.Connection[Any]]:
        """Return a transaction in which the user's output and the progress of these batches of this session are
        committed together. For one batch use `batch.transaction()`, which has the details.
        """
        self._member.check_owner()
        self._poll_monitor.check_thread()
        for batch in batches:
            if isinstance(batch, Batch) and not batch.is_from(self._assignment):
                raise UsageError(
                    f"{batch!r} is of another session: use that one's transaction, or batch.transaction()."
                )
        try:
            with self._transactions.run(batches) as connection:
                yield connection
        except GrantLost as lost:
            self._assignment.lose(lost.stream_id, lost.grant_id)
            raise
        self._poll_monitor.touch()

    def wait(self, timeout_s: float) -> None:
        """Pause between two calls on one batch, and act on what has arrived: its `is_lost` is up to date afterwards.
        Raise `SubscriptionEnded`.
        """
        self._member.check_owner()
        self._poll_monitor.check_thread()
        checked_s = check_timeout(timeout_s)
        deadline = math.inf if checked_s is None else time.monotonic() + checked_s
        with self._poll_monitor.user_call():
            while not self.is_closed:
                self._member.receive(min(max(deadline - time.monotonic(), 0.0), MAX_WAIT_S))
                if time.monotonic() >= deadline:
                    return

    def may_continue(self, batch: Batch) -> bool:
        """Return whether another user call may begin on this batch now: only while its grant is valid."""
        self._member.check_owner()
        return self._member.may_continue(batch.stream_id, batch.grant_id)

    def drain(self) -> None:
        """Finish what was given out, hand everything over, and let the iteration end. From any thread or handler."""
        self._member.check_owner()
        self._batch_reader.is_draining = True
        self._member.events.wakeup()

    def leave(self) -> None:
        """Begin to hand over now, also in the middle of a batch, and let the iteration end. From any thread.

        A batch acknowledged within the unsubscribe timeout counts; one that is not will be delivered again.
        """
        self.drain()
        self._leave()

    def assignment(self) -> dict[int, int]:
        """Return {stream: next offset to deliver} of the streams held now, without those handed back."""
        self._member.check_owner()
        return {} if self.is_closed else self._assignment.positions()

    def lag(self) -> dict[int, int]:
        """Return {stream: messages between its progress and its end} of the held streams that were read, as last
        seen.
        """
        self._member.check_owner()
        return {} if self.is_closed else self._assignment.lags()

    def close(self, *, aborted: bool = False) -> None:
        """Leave the group and wait until the last progress is durable, within the unsubscribe timeout and a lease.

        Batches not acknowledged are given up: their messages will be delivered again. `aborted`: they were being
        processed, which the group's history is to record; that takes the whole unsubscribe timeout. Closing again has
        no effect, nor has closing in a forked child.
        """
        if self._member.owner.is_forked:
            return
        if not (self.is_closed or aborted):
            self._assignment.abandon_outstanding()
        self._leave()
        self._member.close()

    @property
    def head_counters(self) -> NewHeadCounters:
        """Return how this session has learned of new messages so far: by push, or by polling."""
        return self._member.monitor.counters

    @property
    def connections(self) -> dict[str, AgentSideCounters]:
        """Return {node address: counters of the connection to this session's agent}, of the nodes in use."""
        return self._member.agent.connection_counters()

    @property
    def is_closed(self) -> bool:
        """Return whether the session holds no streams and will hold none."""
        return self._member.is_closed

    # --- inside -----------------------------------------------------------------------------------------------------

    def _join_again(self) -> None:
        """Join the group again for a user who polls after the member was given up."""
        log.warning("group joined again: subscription=%s", self.subscription)
        self._last = None
        self._failed.clear()
        self._member.join()
        self._poll_monitor.start()

    def _acknowledge_last(self) -> None:
        """Acknowledge what was given out last, unless it is a loop's to acknowledge."""
        self._transactions.resolve()
        if self._last is not None and not self.loops.has(self._last):
            self._acknowledge(self._last)

    def _acknowledge(self, batch: Batch) -> None:
        """Acknowledge the batch; it has failed if transactions are to do that, and have not done all of it."""
        if self._auto_ack:
            if batch.has_uncommitted_transaction and batch.is_outstanding:
                self._fail(batch)
            else:
                batch.ack()

    def _fail(self, batch: Batch) -> None:
        """Return the batch to be given out again."""
        self._failed.add_failed(batch)
        self.give_back(batch)

    def _mark_given(self, batch: Batch) -> None:
        """Note that the batch is in the user's hands when `poll` returns, if no exception prevents that."""
        self._last = batch  # first: from here on `_recover` finds the batch
        self._batch_reader.on_given()
        self._failed.discard(batch)
        self._transactions.forget_refusal(batch)

    def _recover(self, previous_batch: Batch | None) -> None:
        """Have the next call give out what was taken of a stream and not given out, after an exception in the middle of
        `poll`, such as one of a signal handler. `previous_batch`: the progress of what had been given out."""
        last = self._last
        if is_given := last is not None and last is not previous_batch:
            self._fail(last)
        self._batch_reader.recover(is_given=is_given)
        self._poll_monitor.end_call()
        self._member.events.release_fully()
        self._assignment.recover_read()

    def _is_drained(self) -> bool:
        """Return whether no epochs given out in part and no failed batches are left, or that takes too long."""
        if self._drain_deadline is None:
            self._drain_deadline = time.monotonic() + self._member.settings.unsubscribe_timeout_s
        is_over = time.monotonic() >= self._drain_deadline
        return is_over or not (self._assignment.is_mid_step or self._failed.has_outstanding())

    def _leave(self) -> None:
        if not self._member.is_leaving:
            self._assignment.abort_steps()
            self._member.leave()

    def _check_epochs(self) -> None:
        if (on_epochs_consumed := self._on_epochs_consumed) is not None:
            for space_id, frontier in tuple(self._assignment.epochs.items()):
                if (announced := self._announced.get(space_id)) is None or announced.consumed != frontier.consumed:
                    self._poll_monitor.call_user(on_epochs_consumed, frontier)
                    self._announced[space_id] = frontier
        if self._whole_epochs and self._assignment.has_non_atomic():
            raise UsageError(
                f"{self.subscription}: whole epochs are asked for, and its group is not atomic. Create it with `sublet "
                "groups create --atomic` before its first consumer comes, or leave whole_epochs out."
            )
