"""A session whose work is done elsewhere, a part at a time: what it plans of its streams, and hears the end of later.

It plans nothing of which it could not say later whether it was done: what is planned is written down in the group's
rows first, and `plan` waits for that. See `sublet_borrower.planner.plan_ledger`. One thread uses it; an agent's thread
keeps it in touch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sublet_borrower.agent.event_queue import EventQueue
from sublet_borrower.agent.thread import AgentThread
from sublet_borrower.consumer.transport import database_transport
from sublet_borrower.fetch.database import LogReader
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import SessionProgress
from sublet_borrower.new_data.head_tracker import HeadPushed, HeadSubscription
from sublet_borrower.new_data.monitor import NewDataMonitor
from sublet_borrower.planner.epoch_planner import EpochPlanner
from sublet_borrower.planner.micro_batch import (
    BatchLimits,
    PlannedRange,
    PlannedStream,
    RangeOutcome,
    StartedRange,
    resolve_outcome,
)
from sublet_borrower.planner.plan_ledger import PlanLedger
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import InvalidSetting, PoisonBlock, SubscriptionEnded, Unavailable
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.messages import InvalidateReason
from sublet_storage.bootstrap.database import open_database
from sublet_storage.groups import fencing
from sublet_storage.log import log as message_log

log = logging.getLogger(__name__)

AVAILABLE_NOW_S = 120.0
"""For so long a plan that is to be finite waits for streams that nobody has."""
LAGS_S = 1.0
"""Between two looks at how far all streams go, for people."""
POLL_INTERVAL_S = 0.25
"""Between two looks at the database for what became of what was begun."""

WRITTEN_S = 10.0
"""How long a plan that nobody writes down keeps a query at least: then it is asked for again, or a finite one fails."""


class MicroBatchPlanner:
    """See the module's page. `name` is the session's, which stays the same from process to process. `hold_s`: for how
    long what is in doubt is kept for it when it is lost. `whole_epochs`: the group must be atomic. `granted_within_s`:
    how long a finite plan waits for what nobody has. The rest is as for `Session`.

    Raises what `Session` raises.
    """

    def __init__(
        self,
        subscription: str,
        url: str | None = None,
        *,
        name: str,
        hold_s: float,
        data_dir: Path | str | None = None,
        nodes: Sequence[str] | None = None,
        weight: float = 1.0,
        starting_position: str = "latest",
        whole_epochs: bool = False,
        granted_within_s: float = AVAILABLE_NOW_S,
        settings: BorrowerSettings | None = None,
    ) -> None:
        self._filter = Subscription.parse(subscription).filter
        self.subscription, self.name = str(Subscription.parse(subscription)), name
        self.settings = settings or BorrowerSettings.from_env()
        self._planning = PlanLedger(self._report, hold_s)
        self._inbox = EventQueue(self._planning.apply_update)
        self._over = self._leaving = False
        self._whole_epochs = whole_epochs
        self._group: int | None = None
        self._spaces: dict[int, str] = {}
        self._granted_within_s = granted_within_s
        self._targets: dict[int, int] | None = None
        self._lags_at = float("-inf")
        with contextlib.ExitStack() as opened:
            self.url = opened.enter_context(open_database(url, data_dir)).url
            way = database_transport(opened, self.url, None, nodes, 1, self.settings, lambda: 0)
            assert isinstance(way.reader, LogReader)
            self._reader = way.reader
            self._agent = AgentThread(way.discover_nodes, self.settings)
            opened.callback(self._agent.close)
            epoch = way.next_session_epoch()
            self._resources = opened.pop_all()
        self._epochs = EpochPlanner(self._planning, self._reader, self.spaces)
        self._monitor = NewDataMonitor(self._planning, self._reader.fetch_heads, self._follow, self._unfollow)
        self._handle = self._agent.subscribe(
            self.subscription, self._inbox, weight=weight, session=name, start=starting_position, session_epoch=epoch
        )

    @property
    def group_id(self) -> int:
        """Of the group that has lent what is planned."""
        assert self._group is not None, "nothing is planned of streams that nobody has lent"
        return self._group

    # --- after a restart --------------------------------------------------------------------------------------------

    def restore(self, done: Iterable[PlannedRange], begun: Iterable[PlannedRange] = ()) -> None:
        """What is known of earlier processes of this session: see `PlanLedger.restore`. Say it once, first of all."""
        self._planning.restore(done, begun)

    def resolve_started(self, begun: Iterable[PlannedRange]) -> tuple[list[StartedRange], list[PlannedRange]]:
        """Wait until it is known what became of each: those that are to be done again, and those that others have got,
        or may get. What is neither was done, and that is durable.

        A leader that cannot be reached is waited for: what was begun is kept for the session meanwhile. Raises
        `SubscriptionEnded`.
        """
        open, again, lost = set(begun), [], []
        while open:
            self._digest()
            self._epochs.restore_steps()
            for planned in tuple(open):
                if (found := self._planning.restart(planned)) is not None:
                    again.append(found)
                    open.discard(planned)
            done, gone = self._look(open)
            for planned in (*done, *gone):
                self._planning.drop_started(planned)
            open -= {*done, *gone}
            lost += gone
            if open:
                self._wait()
        return again, lost

    def put_off(self, poison: Mapping[PlannedRange, PoisonBlock]) -> None:
        """Do not do again what was begun and has a block that cannot be decoded. When this returns the rows say so.
        What lies before the block is planned next; then the stream is handed back. Raises `SubscriptionEnded`."""
        self._planning.put_off(poison)
        while RangeOutcome.OPEN in self._fates(poison).values():
            self._wait()
            self._digest()

    def _wait(self) -> None:
        with self._planning.changed:
            self._planning.changed.wait(POLL_INTERVAL_S)

    def _look(self, begun: Iterable[PlannedRange]) -> tuple[list[PlannedRange], list[PlannedRange]]:
        """Of which the rows say that they will not come back to us: those that are done, or put off, and those that are
        lost."""
        fates = self._fates(begun)
        done = [planned for planned, became in fates.items() if became in (RangeOutcome.DONE, RangeOutcome.PUT_OFF)]
        return done, [planned for planned, became in fates.items() if became is RangeOutcome.LOST]

    def _fates(self, begun: Iterable[PlannedRange]) -> dict[PlannedRange, RangeOutcome]:
        """What became of each; `OPEN` where the rows cannot be asked."""
        group_id, begun = self._group, list(begun)
        if group_id is None or not begun:
            return dict.fromkeys(begun, RangeOutcome.OPEN)
        streams = [planned.stream_id for planned in begun]
        plans = self._reader.query(lambda connection: fencing.read_last_planned_ranges(connection, group_id, streams))
        if plans is None:
            return dict.fromkeys(begun, RangeOutcome.OPEN)
        return {planned: resolve_outcome(planned, plans.get(planned.stream_id), self.name) for planned in begun}

    # --- batch by batch ---------------------------------------------------------------------------------------------

    def acknowledge(self, done: Iterable[PlannedRange]) -> None:
        """These are done for good. The leader hears of it with the next `plan`."""
        self._planning.acknowledge(done)

    def plan(self, most: BatchLimits, wait_s: float = 0.0, *, finite: bool = False) -> list[StartedRange]:
        """What is to be done next; nothing of it is begun before it is written down. Empty: nothing.

        What was planned before and is not acknowledged is among it. Where there is nothing it waits so long for news. A
        leader that has a plan to write down is waited for, for `WRITTEN_S` at least. `finite`: nothing is planned
        behind where the streams ended when they were first looked at, and it waits until there is a plan, or all that
        was there for the group at the first such call is done, by whomever, or blocked. What other members have is
        waited for no longer than what nobody has, and then left to them.

        Raises `SubscriptionEnded`, and `Unavailable` where that is not lent, or not written down, for too long.
        """
        deadline = time.monotonic() + (self._granted_within_s if finite else wait_s)
        self._digest()
        while True:
            if finite and self._targets is None:
                self._left()
            self._see()
            self._epochs.restore_steps()
            self._check_kind()
            self._planning.hand_back()
            self._planning.plan(self._ends(self._planning.plannable_streams(self._may_start, finite=finite), most))
            self._planning.plan_steps(self._epochs.plan_steps(most, self._may_start, finite=finite))
            self._planning.report_progress()
            self._await_written(max(deadline, time.monotonic() + WRITTEN_S))
            if planned := self._planning.take_saved_plans():
                return planned
            if self._monitor.poll() and not self._planning.has_unsaved_plan():
                continue
            left_s = deadline - time.monotonic()
            if finite and self._is_through():
                return []
            if left_s <= 0:
                if finite:
                    self._give_up()
                return []
            self._digest(min(self._monitor.wait_s, left_s, POLL_INTERVAL_S if finite else left_s))

    def unsaved_ranges(self) -> tuple[PlannedRange, ...]:
        """What is acknowledged and not known to be written down: who begins with a checkpoint that knows nothing of it
        does it again."""
        done, gone = self._look(self._planning.unsaved_ranges())
        for planned in (*done, *gone):
            self._planning.drop_done(planned)
        return self._planning.unsaved_ranges()

    def _ends(self, waiting: list[PlannedStream], most: BatchLimits) -> dict[int, int]:
        """{stream: up to where to plan}."""
        ends = split_evenly(waiting, most.max_messages)
        if most.max_bytes is None or not ends:
            return ends
        limit_bytes = max(most.max_bytes // len(ends), 1)
        wanted = [
            (granted.grant.stream_id, granted.grant.generation_id, granted.position, ends[granted.grant.stream_id])
            for granted in waiting
            if granted.grant.stream_id in ends
        ]
        return (
            self._reader.query(lambda connection: message_log.limit_ranges_by_size(connection, wanted, limit_bytes))
            or {}
        )

    def _check_kind(self) -> None:
        if self._whole_epochs and self._planning.has_non_atomic():
            raise InvalidSetting(
                f"option wholeEpochs is true, and the group of {self.subscription} is not atomic: its members do not "
                "wait for epochs. Create it with `sublet groups create --atomic`, or leave the option out."
            )

    def _await_written(self, until: float) -> None:
        """What is planned and not written down is either, once a leader is there, or is not ours; or begun later."""
        while self._planning.has_unsaved_plan() and time.monotonic() < until:
            with self._planning.changed:
                self._planning.changed.wait_for(lambda: not self._planning.has_unsaved_plan(), POLL_INTERVAL_S)
            self._digest()

    def _is_through(self) -> bool:
        """All that was there for the group is done, or blocked."""
        return self._left() == [] and self._planning.is_caught_up()

    def _left(self) -> list[fencing.Ahead] | None:
        """Streams with something that was there for the group at first, and that are not here: what is here the
        planning knows of. None where the rows cannot be asked."""
        group_id = self._group
        rows = (
            None if group_id is None else self._reader.query(lambda conn: fencing.ahead(conn, group_id, self._filter))
        )
        if rows is None:
            return None
        if self._targets is None:
            self._targets = {stream_id: each.head for stream_id, each in rows.items()}
        here, targets = self._planning.lags(), self._targets
        return [
            each
            for stream_id, each in rows.items()
            if each.position < targets.get(stream_id, 0) and each.status != "blocked" and stream_id not in here
        ]

    def _give_up(self) -> None:
        """Raise `Unavailable`, unless other members have all that is left."""
        left, unwritten = self._left(), self._planning.has_unsaved_plan()
        unlent = [each.stream_id for each in left or () if not each.is_anothers(self.name)]
        if left and not unlent and not unwritten:
            log.warning(
                "%s: this query ends after %g s without work, and other members have not done all that was there: "
                "streams %s of %d",
                self.subscription,
                self._granted_within_s,
                [each.stream_id for each in left[:5]],
                len(left),
            )
            return
        silent = "no leader has written down what it plans" if unwritten else "no leader has answered"
        what = f"streams {unlent[:5]} of {len(unlent)} were not lent to it" if unlent else silent
        raise Unavailable(
            f"{self.subscription}: {what} within {self._granted_within_s:g} s, and what was there is not all read. "
            f"`sublet groups why '{self.subscription}'` says what they wait for; the option availableNowWait waits "
            "longer."
        )

    def spaces(self, stream_ids: Iterable[int]) -> dict[int, str]:
        """The name of each stream's space."""
        missing = [stream_id for stream_id in stream_ids if stream_id not in self._spaces]
        while missing:
            found = self._reader.query(lambda connection: message_log.read_space_names(connection, missing))
            if found is not None:
                self._spaces.update(found)
                break
            time.sleep(POLL_INTERVAL_S)
        return self._spaces

    def lags(self) -> dict[int, tuple[int, int]]:
        """{stream: (next offset to acknowledge, head)}, as they were about a second ago."""
        if time.monotonic() >= self._lags_at:
            self._lags_at = time.monotonic() + LAGS_S
            self._planning.update_heads(self._reader.fetch_heads(self._planning.lags()))
        return self._planning.lags()

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the group: what is in doubt stays reserved for the session, all else is free at once."""
        wait_s = (
            self.settings.unsubscribe_timeout_s + self.settings.disconnect_timeout_s if timeout_s is None else timeout_s
        )
        deadline = time.monotonic() + wait_s
        if not (self._over or self._leaving):
            self._leaving = True
            self._planning.abandon()
            self._agent.unsubscribe(self._handle)
        while not self._over and time.monotonic() < deadline:
            with contextlib.suppress(SubscriptionEnded):
                self._digest(0.1)
        self._over = True
        self._resources.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _see(self) -> None:
        """Learn how far the streams go that were not looked at, or are said to go on."""
        if unseen := self._planning.streams_to_poll():
            self._planning.update_heads(self._reader.fetch_heads(unseen))

    def _digest(self, wait_s: float = 0.0) -> None:
        found = self._inbox.take(wait_s)
        self._group = self._agent.group_id(self._handle) or self._group
        for news in found:
            if isinstance(news, HeadPushed):
                self._monitor.on_head_pushed(news)
                continue
            assert isinstance(news, SubscriptionClosed), "what is told of streams has been heard"
            self._over = True
            if news.reason is not InvalidateReason.DONE:
                raise SubscriptionEnded(self.subscription, news.reason.value, news.detail)

    def _may_start(self, granted: PlannedStream) -> bool:
        return self._agent.may_start_call(self._handle, granted.grant.stream_id, granted.grant.grant_id)

    def _report(self, progress: SessionProgress) -> None:
        self._agent.report_progress(self._handle, progress)

    def _follow(self, follow: HeadSubscription) -> None:
        self._agent.subscribe_head(self._handle, follow)

    def _unfollow(self, follow: HeadSubscription) -> None:
        self._agent.unsubscribe_head(self._handle, follow)


def split_evenly(waiting: Sequence[PlannedStream], most_messages: int | None) -> dict[int, int]:
    """{stream: up to which offset} of so many messages in all, at least one. Who has few leaves its share to the
    others, and where there are more streams than messages the first of those that wait get one each."""
    wanted = [(granted.plannable_end - granted.position, granted) for granted in waiting[:most_messages]]
    wanted.sort(key=lambda pair: pair[0])
    left = sum(lag for lag, _ in wanted) if most_messages is None else most_messages
    ends = {}
    for others, (lag, granted) in zip(range(len(wanted), 0, -1), wanted, strict=True):
        share = min(lag, left // others)
        left -= share
        ends[granted.grant.stream_id] = granted.position + share
    return ends
