"""A group member that plans ranges for an engine to process, such as Spark's micro-batches.

What is planned is saved in the group's rows first, and `plan` waits for that, so that its outcome can be found out
later. See `sublet_borrower.planner.plan_ledger`. One thread uses it; an agent's thread keeps it in touch.
"""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sublet_borrower.consumer.database_or_node_access import database_transport
from sublet_borrower.consumer.group_membership import GroupMembership
from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.planner.complete_epoch_planner import EpochPlanner
from sublet_borrower.planner.grant_key_files import GrantKeyHandoffFile
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import (
    PlanLimits,
    PlannedRange,
    PlannedRangeStatus,
    PlannerStream,
    RunnablePlannedRange,
    resolve_outcome,
)
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting, PoisonBlock, Unavailable
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.groups import consumer_progress
from sublet_storage.log import fetch as message_log

log = logging.getLogger(__name__)

AVAILABLE_NOW_TIMEOUT_S = 120.0
"""How long a finite plan waits for streams without a holder."""
JOIN_TIMEOUT_S = 10.0
"""How long the first call waits for a stream: a query with the trigger `once` has no other."""
LAG_INTERVAL_S = 1.0
"""Between two reads of all heads for the progress display."""
POLL_INTERVAL_S = 0.25
"""Between two reads of the outcomes of started ranges."""

PLAN_SAVED_TIMEOUT_S = 10.0
"""How long `plan` waits at least for a leader to save the plan: then it is sent again, or a finite plan fails."""


class MicroBatchPlanner:
    """A group member that plans ranges for an engine to process; see the module's docstring. `name` is the session's,
    which stays the same from process to process. `hold_s`: for how long what is in doubt is reserved for it when it is
    lost. `whole_epochs`: the group must be atomic. `granted_within_s`: how long a finite plan waits for streams without
    a holder. The rest is as for `Session`.

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
        granted_within_s: float = AVAILABLE_NOW_TIMEOUT_S,
        settings: BorrowerSettings | None = None,
    ) -> None:
        self.name = name
        settings = settings or BorrowerSettings.from_env()
        timeout_s = settings.read_timeout_s
        self._filter = Subscription.parse(subscription).filter
        self._whole_epochs, self._granted_within_s = whole_epochs, granted_within_s
        self._spaces: dict[tuple[int, int], str] = {}
        self._targets: dict[int, int] | None = None
        self._lags_at = float("-inf")
        self._member = GroupMembership(
            subscription,
            lambda report: MicroBatchPlanLedger(report, hold_s, self._hand_key),
            lambda opened: database_transport(opened, url, data_dir, nodes, 1, timeout_s, listens=False),
            settings,
            name=name,
            weight=weight,
            starting_position=starting_position,
        )
        assert isinstance(self._member.reader, DatabaseMessageReader)
        assert self._member.url is not None
        self._reader, self.url = self._member.reader, self._member.url
        self.subscription, self._ledger = self._member.subscription, self._member.assignment
        self._epochs = EpochPlanner(self._ledger, self._reader, self.subscription)
        self._session = consumer_progress.SessionIdentity(name, self._member.session_epoch)
        self._keys = self._open_keys()
        self._member.join()

    @property
    def group_id(self) -> int:
        """Return the id of the group that has granted what is planned."""
        return self._member.granting_group_id()

    # --- after a restart --------------------------------------------------------------------------------------------

    def restore(self, done: Iterable[PlannedRange], started: Iterable[PlannedRange] = ()) -> None:
        """Take over what is known of earlier processes of this session, first of all, by the ledger's `restore`."""
        self._ledger.restore(done, started)

    def await_join(self, *, granted: bool) -> None:
        """Wait until a leader has answered, with `granted` until there is a stream, for at most `JOIN_TIMEOUT_S`. Raise
        `SubscriptionEnded`."""
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while self._member.group_id is None or (granted and not self._ledger.has_streams()):
            if time.monotonic() >= deadline:
                return
            self._member.receive(POLL_INTERVAL_S)

    def find_superseded(
        self, ranges: Iterable[PlannedRange], wait_s: float = 0.0, *, finite: bool = False
    ) -> list[PlannedRange] | None:
        """Return those of a checkpoint's ranges behind which this session has planned a later one that is done, also of
        another stream: then the checkpoint is an old copy. None where no leader has answered within `wait_s`, or the
        rows cannot be read. `finite`: wait as long as a finite plan does, and raise `Unavailable` then."""
        known = {each.stream_id: each for each in ranges}
        deadline = time.monotonic() + (self._granted_within_s if finite else wait_s)
        while (plans := self._read_last_plans(None)) is None:
            if time.monotonic() >= deadline:
                if finite:
                    raise self._unfinished_error(self._silence_reason())
                return None
            self._member.receive(POLL_INTERVAL_S)
        pairs = [(known[stream_id], last) for stream_id, last in plans.items() if stream_id in known]
        matches = [(last.timeline_number, last.saved_at) for planned, last in pairs if planned.matches(last.in_doubt)]
        saved_at = dict(sorted(matches))  # the last of each timeline, whose servers' clocks may differ
        is_old = any(
            last.is_done and last.saved_at > saved_at.get(last.timeline_number, math.inf) for last in plans.values()
        )
        return [planned for planned, last in pairs if is_old or planned.is_superseded_by(last)]

    def resolve_started(self, started: Iterable[PlannedRange]) -> tuple[list[RunnablePlannedRange], list[PlannedRange]]:
        """Wait until the outcome of each is known. Return those that are to be done again, and those that other members
        have, or may get. All others were done, and that is durable.

        It waits for a leader that cannot be reached: what was started stays reserved meanwhile. Raise
        `SubscriptionEnded`.
        """
        open, runnable, lost = set(started), [], []
        while open:
            self._member.receive()
            self._epochs.restore_steps()
            for planned in tuple(open):
                if (restarted := self._ledger.restart(planned)) is not None:
                    runnable.append(restarted)
                    open.discard(planned)
            done, gone = self._split_by_outcome(open)
            for planned in (*done, *gone):
                self._ledger.drop_started(planned)
            open -= {*done, *gone}
            lost += gone
            if open:
                self._wait()
        return runnable, lost

    def put_off(self, poison: Mapping[PlannedRange, PoisonBlock]) -> None:
        """Skip started ranges with a block that cannot be decoded. When this returns the rows have that."""
        self._ledger.put_off(poison)
        while PlannedRangeStatus.OPEN in self._read_outcomes(poison).values():
            self._wait()
            self._member.receive()

    def _wait(self) -> None:
        with self._ledger.changed:
            self._ledger.changed.wait(POLL_INTERVAL_S)

    def _split_by_outcome(self, started: Iterable[PlannedRange]) -> tuple[list[PlannedRange], list[PlannedRange]]:
        """Return those that will not come back by the rows: which are done, or put off, and which are lost."""
        outcomes = self._read_outcomes(started)
        done = [
            planned
            for planned, outcome in outcomes.items()
            if outcome in (PlannedRangeStatus.DONE, PlannedRangeStatus.PUT_OFF)
        ]
        return done, [planned for planned, outcome in outcomes.items() if outcome is PlannedRangeStatus.LOST]

    def _read_outcomes(self, started: Iterable[PlannedRange]) -> dict[PlannedRange, PlannedRangeStatus]:
        """Return the status of each; `OPEN` where the rows cannot be read."""
        started = list(started)
        plans = self._read_last_plans([planned.stream_id for planned in started]) if started else None
        if plans is None:
            return dict.fromkeys(started, PlannedRangeStatus.OPEN)
        outcomes = {planned: resolve_outcome(planned, plans.get(planned.stream_id)) for planned in started}
        lost = [planned for planned, outcome in outcomes.items() if outcome is PlannedRangeStatus.LOST]
        return outcomes | self._read_outcomes_from_history(lost)

    def _read_last_plans(
        self, stream_ids: Iterable[int] | None
    ) -> dict[int, consumer_progress.LastPlannedRange] | None:
        """Return {stream: what this session has planned of it last} of these, or of all; None where the rows cannot be
        read."""
        group_id = self._member.group_id
        if group_id is None:
            return None
        return self._reader.query(
            lambda conn: consumer_progress.read_last_planned_ranges(conn, group_id, self._session, stream_ids)
        )

    def _read_outcomes_from_history(self, lost: Sequence[PlannedRange]) -> dict[PlannedRange, PlannedRangeStatus]:
        """Return the status, from the history of grants, of ranges whose rows were planned by others since or are
        deleted.
        """
        if not lost:
            return {}
        group_id, grants = self.group_id, [(planned.stream_id, planned.grant_id) for planned in lost]
        ended = self._reader.query(
            lambda connection: consumer_progress.read_ended_grants(connection, group_id, self._session, grants)
        )
        if ended is None:
            return dict.fromkeys(lost, PlannedRangeStatus.OPEN)
        return {
            planned: PlannedRangeStatus.DONE
            for planned, grant in zip(lost, grants, strict=True)
            if grant in ended and planned.was_done_under(*ended[grant])
        }

    # --- batch by batch ---------------------------------------------------------------------------------------------

    def acknowledge(self, done: Iterable[PlannedRange]) -> None:
        """Note that these are done for good; the next `plan` reports it to the leader."""
        self._ledger.acknowledge(done)

    def plan(self, limits: PlanLimits, wait_s: float = 0.0, *, finite: bool = False) -> list[RunnablePlannedRange]:
        """Return the ranges to process next, saved in the rows, with those planned before and not acknowledged.

        `wait_s`: how long to wait for new messages where there are none; it waits at least `PLAN_SAVED_TIMEOUT_S` for a
        leader to save a plan. `finite`: nothing is planned behind where the streams ended at the first such call, and
        it waits until there is a plan, or all that was there for the group then is done, by any member, or blocked. It
        waits no longer for streams of other members than for those without a holder.

        Raise `SubscriptionEnded`, and `Unavailable` where that is not granted, or not saved, for too long.
        """
        deadline = time.monotonic() + (self._granted_within_s if finite else wait_s)
        self._member.receive()
        while True:
            if finite and self._targets is None:
                self._list_unfinished_elsewhere()
            self._poll_heads()
            self._epochs.restore_steps()
            self._check_is_atomic()
            self._ledger.hand_back()
            targets = (self._targets or {}) if finite else None
            self._ledger.plan(self._plan_ends(self._ledger.plannable_streams(self._may_start, targets), limits))
            self._ledger.plan_steps(self._epochs.plan_steps(limits, self._may_start, finite=finite))
            self._ledger.report_progress()
            self._wait_until_saved(max(deadline, time.monotonic() + PLAN_SAVED_TIMEOUT_S))
            if planned := self._ledger.take_saved_plans():
                return planned
            if self._member.monitor.poll() and not self._ledger.has_unsaved_plan():
                continue
            left_s = deadline - time.monotonic()
            if finite and self._is_caught_up():
                return []
            if left_s <= 0:
                if finite:
                    self._check_unfinished()
                return []
            self._member.receive(min(self._member.monitor.wait_s, left_s, POLL_INTERVAL_S if finite else left_s))

    def unsaved_ranges(self) -> tuple[PlannedRange, ...]:
        """Return what is acknowledged and not known to be saved: a checkpoint without it would have it done again."""
        done, gone = self._split_by_outcome(self._ledger.unsaved_ranges())
        for planned in (*done, *gone):
            self._ledger.drop_done(planned)
        return self._ledger.unsaved_ranges()

    def _plan_ends(self, waiting: list[PlannerStream], limits: PlanLimits) -> dict[int, int]:
        """Return {stream: up to which offset to plan}."""
        ends = split_evenly(waiting, limits.max_messages)
        if limits.max_bytes is None or not ends:
            return ends
        limit_bytes = max(limits.max_bytes // len(ends), 1)
        ranges = [
            (granted.grant.stream_id, granted.grant.generation_id, granted.position, ends[granted.grant.stream_id])
            for granted in waiting
            if granted.grant.stream_id in ends
        ]
        return (
            self._reader.query(lambda connection: message_log.limit_ranges_by_size(connection, ranges, limit_bytes))
            or {}
        )

    def _check_is_atomic(self) -> None:
        if self._whole_epochs and self._ledger.has_non_atomic():
            raise InvalidSetting(
                f"option wholeEpochs is true, and the group of {self.subscription} is not atomic: its members do not "
                "wait for epochs. Create it with `sublet groups create --atomic`, or leave the option out."
            )

    def _wait_until_saved(self, deadline: float) -> None:
        """Wait until what is planned is saved or no longer this session's, at most until that time: it may be started
        later.
        """
        while self._ledger.has_unsaved_plan() and time.monotonic() < deadline:
            with self._ledger.changed:
                self._ledger.changed.wait_for(lambda: not self._ledger.has_unsaved_plan(), POLL_INTERVAL_S)
            self._member.receive()

    def _is_caught_up(self) -> bool:
        """Return whether all that was there for the group is done, or blocked."""
        return self._list_unfinished_elsewhere() == [] and self._ledger.is_caught_up(self._targets or {})

    def _list_unfinished_elsewhere(self) -> list[consumer_progress.LaggingStream] | None:
        """Return the streams with something that was there for the group at first, without those that the ledger has.
        None where the rows cannot be read."""
        group_id = self._member.group_id
        rows = (
            None
            if group_id is None
            else self._reader.query(
                lambda conn: consumer_progress.read_lagging_streams(conn, group_id, self._session, self._filter)
            )
        )
        if rows is None:
            return None
        if self._targets is None:
            self._targets = {stream_id: each.head for stream_id, each in rows.items()}
        here, targets = self._ledger.lags(), self._targets
        return [
            each
            for stream_id, each in rows.items()
            if each.position < targets.get(stream_id, 0) and each.status != "blocked" and stream_id not in here
        ]

    def _check_unfinished(self) -> None:
        """Raise `Unavailable`, unless other members have all that is left."""
        left, unwritten = self._list_unfinished_elsewhere(), self._ledger.has_unsaved_plan()
        not_granted = [each.stream_id for each in left or () if not each.is_anothers]
        if left and not not_granted and not unwritten:
            log.warning(
                "query ended before other members finished: subscription=%s timeout_s=%g stream_count=%d stream_ids=%s",
                self.subscription,
                self._granted_within_s,
                len(left),
                [each.stream_id for each in left[:5]],
            )
            return
        reason = self._silence_reason() if left is None else "no leader has answered"
        if unwritten:
            reason = "no leader has written down what it plans"
        if not_granted:
            reason = f"streams {not_granted[:5]} of {len(not_granted)} were not granted to it"
        raise self._unfinished_error(reason)

    def _silence_reason(self) -> str:
        return "no leader has answered" if self._member.group_id is None else "the database has not answered"

    def _unfinished_error(self, reason: str) -> Unavailable:
        return Unavailable(
            f"{self.subscription}: {reason} within {self._granted_within_s:g} s, and what was there is not all read. "
            f"`sublet groups why {shlex.quote(str(self.subscription))}` says what they wait for; the option "
            "availableNowWait waits longer."
        )

    def spaces(self, grants: Iterable[tuple[int, int]]) -> dict[int, str]:
        """Return {stream: the name of its space} of these (stream, grant id). On another timeline of the database the
        stream of that number may be in another space. Raise `DatabaseUnreachable` if that cannot be read for as long as
        a finite plan waits."""
        deadline = time.monotonic() + self._granted_within_s
        keys = {stream_id: (stream_id, timeline_number(grant_id)) for stream_id, grant_id in grants}
        missing = [stream_id for stream_id, key in keys.items() if key not in self._spaces]
        while missing:
            names = self._reader.query(lambda connection: message_log.read_space_names(connection, missing))
            if names is not None:
                self._spaces.update({keys[stream_id]: name for stream_id, name in names.items()})
                break
            if time.monotonic() > deadline:
                raise DatabaseUnreachable(
                    f"{self.subscription}: the spaces of the planned streams could not be read for "
                    f"{self._granted_within_s:g} s, as the database is away. Start the query again when it is back: it "
                    "does the batch again."
                )
            time.sleep(POLL_INTERVAL_S)
        return {stream_id: self._spaces[key] for stream_id, key in keys.items() if key in self._spaces}

    def lags(self) -> dict[int, tuple[int, int]]:
        """Return {stream: (next offset to acknowledge, head)}, as they were about a second ago."""
        if time.monotonic() >= self._lags_at:
            self._lags_at = time.monotonic() + LAG_INTERVAL_S
            self._ledger.update_heads(self._reader.fetch_heads(self._ledger.lags()))
        return self._ledger.lags()

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the group: what is in doubt stays reserved for the session, all else is free at once. In a forked
        child, which has a copy of the parent's connections, it has no effect."""
        if self._member.owner.is_forked:
            return
        if not (self._member.is_closed or self._member.is_leaving):
            self._ledger.abandon()
        self._member.close(timeout_s)
        if self._keys is not None:
            self._keys.close()
            self._keys = None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _open_keys(self) -> GrantKeyHandoffFile | None:
        """Return where the keys are for a guard; without it the query goes on."""
        try:
            return GrantKeyHandoffFile(self.subscription, self._session)
        except (OSError, InvalidSetting) as error:
            log.warning("grant keys not stored, no guard can commit: subscription=%s: %s", self.subscription, error)
            return None

    def _hand_key(self, grant: Grant) -> None:
        if self._keys is not None:
            try:
                self._keys.add(grant)
            except (OSError, InvalidSetting) as error:
                text = "grant key not stored, no guard can commit: subscription=%s stream_id=%d: %s"
                log.warning(text, self.subscription, grant.stream_id, error)

    def _poll_heads(self) -> None:
        """Read the heads of streams that were not looked at yet, or have a head hint."""
        if stream_ids := self._ledger.streams_to_poll():
            known_ends = self._ledger.known_ends(stream_ids)
            heads = self._reader.fetch_heads(stream_ids)
            self._ledger.update_heads(heads)
            for stream_id, error in self._ledger.end_beyond_head(heads, known_ends).items():
                text = "stream unreadable, handed back: subscription=%s stream_id=%d: %s"
                log.warning(text, self.subscription, stream_id, error)

    def _may_start(self, granted: PlannerStream) -> bool:
        return self._member.may_start_call(granted.grant.stream_id, granted.grant.grant_id)


def split_evenly(waiting: Sequence[PlannerStream], max_messages: int | None) -> dict[int, int]:
    """Return {stream: end offset} for a plan of at most `max_messages` in all, at least one; None: no limit. A stream
    with few leaves its share to the others; where there are more streams than messages, the first get one each.
    """
    lags = [(granted.plannable_end - granted.position, granted) for granted in waiting[:max_messages]]
    lags.sort(key=lambda pair: pair[0])
    left = sum(lag for lag, _ in lags) if max_messages is None else max_messages
    ends = {}
    for others, (lag, granted) in zip(range(len(lags), 0, -1), lags, strict=True):
        share = min(lag, left // others)
        left -= share
        ends[granted.grant.stream_id] = granted.position + share
    return ends
