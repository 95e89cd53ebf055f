"""The machine of a node: its group leaders, the groups it leads, and leader lookups; pure.

The flow of a first subscriber: `LeaderWanted` comes in, the group is opened, its leadership claimed, its rows loaded, a
`GroupLeader` made and the message passed to it. Other borrowers wait meanwhile. If another node leads, the answer is
its address. Writes of all groups leave in one `CommitWrites` at a time; later writes, and what is too much for
one, go into the next.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import assert_never

from sublet_leader import election as el
from sublet_leader.election.leadership_restrictions import LeadershipRestrictions
from sublet_leader.group import events as group_events
from sublet_leader.group.machine import GroupLeader
from sublet_leader.group.watch_events import STEP_DOWN, GroupWatchEvent, transient_record
from sublet_leader.node.caller_count_limit import CallerCountLimit
from sublet_leader.node.events import (
    AgentLongPollChanged,
    AgentMessageReceived,
    AgentsExpired,
    ClaimLeadership,
    CommitWrites,
    DatabaseAnswer,
    FindOrCreateGroup,
    GroupFoundOrCreated,
    GroupLeaderEvent,
    GroupLoadCompleted,
    LeaderLookupCompleted,
    LeadershipClaimCompleted,
    LeadershipReleaseCompleted,
    LeadershipRenewalCompleted,
    LoadGroup,
    LookUpLeader,
    NodeDesiredStateRead,
    NodeEvent,
    NodeOutcome,
    NodeOutcomeBuilder,
    NodeStarted,
    ReleaseLeaderships,
    RenewLeaderships,
    SessionEpochRead,
    ShutdownRequested,
    StreamsChanged,
    WatcherLeaderQueryReceived,
    WritesCommitFailed,
    WritesCommitted,
)
from sublet_leader.node.forged_session_checker import ForgedSessionChecker
from sublet_leader.node.group_event_publisher import MAX_QUERIES, MAX_QUERIES_OF_CALLER, LeaderLookups
from sublet_leader.node.group_registry import GroupRegistry
from sublet_leader.node.message_reassembler import MessageReassembler
from sublet_leader.node.pending_writes import PendingWrites, take_batch
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.agent_secret import is_borrower_of
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    ToLeader,
    UpdateProgress,
)
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import (
    MAINTENANCE,
    TAKEOVER,
    Group,
    GroupWrites,
    HistoryRecord,
    StartingPosition,
)
from sublet_storage.node_directory import NodeIncarnation

_NEVER = float("inf")


class Node:
    """One incarnation of one node. Borrowers know it by its address, the database by its incarnation."""

    def __init__(self, ref: NodeIncarnation, settings: LeaderSettings) -> None:
        self.ref, self.settings = ref, settings
        self.election = el.Election(settings, ref.incarnation)
        self.leaders: dict[int, GroupLeader] = {}
        self.query_counts = CallerCountLimit(MAX_QUERIES_OF_CALLER, MAX_QUERIES)
        self.registry = GroupRegistry(self.query_counts)
        self._wake: dict[int, float] = {}
        self._election_wake = _NEVER
        self._dead_agents = el.DeadAgentDetector(settings)
        self._pending_writes: dict[int, PendingWrites] = {}
        self._committing = False
        self._stop_by: float | None = None
        self._releasing_all = False
        self._restrictions = LeadershipRestrictions(settings.lease_duration_s)
        self._leader_lookups = LeaderLookups(self.query_counts)
        self._parts = MessageReassembler()
        self.foreign_pings = 0
        self._session_epochs = ForgedSessionChecker(self.query_counts)
        self._out = NodeOutcomeBuilder()

    # --- entry point --------------------------------------------------------------------------------------------------

    def decide(self, event: NodeEvent, now: float) -> NodeOutcome:
        """Handle one event and return the outcome."""
        self._out = NodeOutcomeBuilder()
        match event:
            case NodeStarted():
                if self._stop_by is None:
                    self._elect(el.StartCampaign(MAINTENANCE), now)
            case AgentMessageReceived() | AgentLongPollChanged() | AgentsExpired():
                self._on_agent_event(event, now)
            case WatcherLeaderQueryReceived():
                self._on_leader_query(event)
            case GroupLeaderEvent(group_id, leader_event):
                self._run_led((group_id,), leader_event, now)
            case StreamsChanged():
                self._read_streams_again(event, now)
            case NodeDesiredStateRead():
                self._apply_desired_state(event, now)
            case ShutdownRequested():
                self._stop_by = event.deadline if self._stop_by is None else self._stop_by
            case Tick():
                self._pass_time(now)
            case _:
                self._on_database_answer(event, now)
        self._commit()
        is_stopped = self._shut_down(now)
        return self._out.build(self._wake_at(), is_stopped)

    def _on_database_answer(self, event: DatabaseAnswer | el.LockEvent, now: float) -> None:
        match event:
            case el.OwnLivenessLockAcquired() | el.LivenessLockLost() | el.PeerLocksChecked():
                self._take_lock_event(event, now)
            case GroupFoundOrCreated():
                self._on_group_opened(event, now)
            case LeadershipClaimCompleted() | LeadershipRenewalCompleted() | LeadershipReleaseCompleted():
                self._elect(event.to_election_event(), now)
            case GroupLoadCompleted():
                self._on_group_loaded(event, now)
            case WritesCommitted() | WritesCommitFailed():
                self._on_commit_answered(event, now)
            case LeaderLookupCompleted():
                self._on_leader_lookup_completed(event)
            case SessionEpochRead():
                drawn, denied = self._session_epochs.take_answer(event)
                self._out.sends.extend(denied)
                for received, request in drawn:
                    self._handle_leader_wanted(received, request, now)
            case _:
                assert_never(event)

    def lock_keys(self) -> tuple[int, ...]:
        """Return the keys of the locks to check: of rivals, and of agents that may be gone. Thread-safe."""
        return (*self.election.rival_keys(), *self._dead_agents.keys())

    def _take_lock_event(self, event: el.LockEvent, now: float) -> None:
        self._elect(event, now)
        if isinstance(event, el.PeerLocksChecked) and (gone := self._dead_agents.check(event)):
            self._run_led(tuple(self.leaders), group_events.AgentProcessesEnded(gone, event.timeline), now)

    def _wake_at(self) -> float:
        stop = (_NEVER if self._stop_by is None else self._stop_by) + self.settings.lease_margin_s * self._releasing_all
        return min([self._election_wake, stop, self.registry.wake_at(), self._parts.wake_at(), *self._wake.values()])

    def _invalidate(self, agent: str, borrower_id: str, reason: BorrowerEndReason, detail: str) -> None:
        self._out.sends.append((agent, Invalidate(borrower_id, 0, reason, detail)))

    # --- watchers -----------------------------------------------------------------------------------------------------

    def _add_watch_events(self, group_id: int, records: Sequence[HistoryRecord]) -> None:
        group = self.registry.find_group_by_id(group_id)
        if group is not None:
            self._out.history.extend(GroupWatchEvent(str(group.subscription), record) for record in records)

    def _on_leader_query(self, query: WatcherLeaderQueryReceived) -> None:
        if self._leader_lookups.add(query.subscription, query.subscriber_id, query.caller):
            self._out.requests.append(LookUpLeader(query.subscription))

    def _on_leader_lookup_completed(self, answer: LeaderLookupCompleted) -> None:
        subscription = answer.request.subscription
        if not answer.is_answered:
            self._leader_lookups.cancel(subscription)
            return
        claim = answer.leadership
        leader = None if claim is None else self.leaders.get(claim.leadership_id)
        members = None if leader is None or claim is None or claim.term != leader.term else leader.members
        self._out.answers.extend(self._leader_lookups.complete(subscription, answer.group, claim, members))
        if claim is not None and claim.remaining_s > 0 and claim.node.incarnation != self.ref.incarnation:
            self._send_elsewhere(subscription, claim.leadership_id, claim.node.address)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _on_agent_event(self, event: AgentMessageReceived | AgentLongPollChanged | AgentsExpired, now: float) -> None:
        if isinstance(event, AgentMessageReceived):
            self._dead_agents.note_message(event.agent, event.message, now)
            self._receive(event, now)
        elif isinstance(event, AgentLongPollChanged):
            self._dead_agents.note_poll(event.agent, event.is_held, now)
        else:
            self._parts.remove_agents(event.agents)
            self.registry.remove_agents(event.agents)

    def _receive(self, received: AgentMessageReceived, now: float) -> None:
        admitted = self._parts.admit(received, now)
        if isinstance(admitted, Invalidate):
            self._out.sends.append((received.agent, admitted))
        if not isinstance(admitted, AgentMessageReceived):
            return
        received, message = admitted, admitted.message
        if isinstance(message, LeaderWanted):
            self._handle_leader_wanted(received, message, now)
        elif isinstance(message, Ping):
            self._ping(received.agent, message, now)
        elif not self._may_wait(message):
            if isinstance(message, Disconnect) and not message.term:
                self.registry.remove_waiter(received.agent, message.borrower_id)
                self._session_epochs.remove_waiter(received.agent, message.borrower_id)
            self._route(message.borrower_id, received, now)

    def _ping(self, agent: str, ping: Ping, now: float) -> None:
        """Answer for the agent's own borrowers; others are counted: one message does not cause a thousand answers."""
        for borrower_id in ping.borrower_ids:
            if is_borrower_of(agent, borrower_id):
                self._route(borrower_id, AgentMessageReceived(agent, Ping((borrower_id,), ping.sent_at)), now)
            else:
                self.foreign_pings += 1

    def _may_wait(self, message: ToLeader) -> bool:
        """Return whether the message can wait. A stopping node writes only final progress, so that it finishes: the
        next leader gets the rest from the reclaim."""
        passing = isinstance(message, UpdateProgress) and not any(p.final for p in message.streams)
        return passing and self._stop_by is not None

    def _route(self, borrower_id: str, received: AgentMessageReceived, now: float) -> None:
        """Pass the message to the group's leader. A borrower without a leader here is invalidated; a leader outside its
        trust window answers nothing."""
        group_id = self.registry.group_of_borrower(received.agent, borrower_id)
        leader = self.leaders.get(group_id) if group_id is not None else None
        if leader is None:
            self._invalidate(received.agent, borrower_id, BorrowerEndReason.RETRY, "this node does not lead its group")
        else:
            self._run_leader(leader, group_events.BorrowerMessageReceived(received.agent, received.message), now)

    def _handle_leader_wanted(self, received: AgentMessageReceived, request: LeaderWanted, now: float) -> None:
        """Lead the group, look up which node does, or deny the request."""
        try:
            subscription = Subscription.parse(request.subscription)
            start = StartingPosition.parse(request.starting_position)
        except (UsageError, ValueError) as error:
            self._invalidate(received.agent, request.borrower_id, BorrowerEndReason.DENIED, str(error))
            return
        if self._stop_by is not None:
            return
        if not self._session_epochs.is_drawn(subscription, received, request):
            self._out.requests.extend(self._session_epochs.add_waiter(subscription, received, request))
            return
        group = self.registry.find_group(subscription)
        if problem := self.registry.add_waiter(subscription, received, request.borrower_id, now):
            self._invalidate(received.agent, request.borrower_id, BorrowerEndReason.DENIED, problem)
            return
        if self._restrictions.is_forbidden(group, now):
            if self._leader_lookups.add(subscription, None, received.caller):
                self._out.requests.append(LookUpLeader(subscription))
        elif group is None:
            if self.registry.begin_opening(subscription, received.caller):
                self._out.requests.append(FindOrCreateGroup(subscription, start, request.group_id, received.principal))
        elif group.group_id in self.leaders:
            self._admit(group, now)
        else:
            self._elect(el.StartCampaign(group.group_id), now)

    def _on_group_opened(self, answer: GroupFoundOrCreated, now: float) -> None:
        request, group = answer.request, answer.group
        stranger = group is not None and group.subscription != request.subscription
        opened_group = None if stranger else group
        known_group = opened_group or self.registry.find_group(request.subscription)
        self.registry.finish_opening(request.subscription, known_group)
        if opened_group is not None:
            if self._stop_by is None and not self._restrictions.is_forbidden(opened_group, now):
                self._elect(el.StartCampaign(opened_group.group_id), now)
        elif answer.is_final or stranger:
            reason = BorrowerEndReason.DENIED if request.group_id is None else BorrowerEndReason.DELETED
            waiting = [received for received, _ in self.registry.take_waiters(request.subscription)]
            self._refuse(waiting, request.group_id, reason, answer.error, now)
        elif answer.is_limited:
            self.registry.remove_subscription(request.subscription)

    def _refuse(
        self,
        waiting: Iterable[AgentMessageReceived],
        group_id: int | None,
        reason: BorrowerEndReason,
        problem: str,
        now: float,
    ) -> None:
        """End the borrowers that requested that very group; serve those that requested another."""
        for received in waiting:
            request = received.message
            assert isinstance(request, LeaderWanted)
            if request.group_id == group_id:
                self._invalidate(received.agent, request.borrower_id, reason, problem)
            else:
                self._handle_leader_wanted(received, request, now)

    def _admit(self, group: Group, now: float) -> None:
        """Pass the waiting requests to the group's leader, unless not repeated in time: their borrowers may be dead."""
        leader = self.leaders[group.group_id]
        for received, borrower_id in self.registry.take_waiters(group.subscription, now - self.settings.ping_timeout_s):
            request = received.message
            assert isinstance(request, LeaderWanted)
            self._dead_agents.note_message(received.agent, request, now)
            if request.group_id is not None and request.group_id > group.group_id:
                # This group is deleted, as its leader will find; or a failover has lost the other one.
                self.registry.add_waiter(group.subscription, received, borrower_id, now)
                if self.registry.begin_opening(group.subscription, received.caller):
                    start = StartingPosition.parse(request.starting_position)
                    self._out.requests.append(FindOrCreateGroup(group.subscription, start, request.group_id))
                continue
            if request.group_id not in (None, group.group_id):
                self._invalidate(received.agent, borrower_id, BorrowerEndReason.DELETED, f"group {request.group_id}")
                continue
            self.registry.bind_borrower(received.agent, borrower_id, group.group_id)
            self._run_leader(leader, group_events.BorrowerMessageReceived(received.agent, request), now)

    # --- leadership -------------------------------------------------------------------------------------------------

    def _elect(self, event: el.Event, now: float) -> None:
        outcome = self.election.decide(event, now)
        key = self.election.lock_key
        self._out.requests.extend(ClaimLeadership(each, now, key, outcome.rivals.get(each)) for each in outcome.claims)
        if outcome.renew:
            self._out.requests.append(RenewLeaderships(outcome.renew, now, key))
        if outcome.release:
            self._out.requests.append(ReleaseLeaderships(outcome.release))
        self._election_wake = _NEVER if outcome.wake_at is None else outcome.wake_at
        for notice in outcome.notices:
            self._take_notice(notice, now)

    def _take_notice(self, notice: el.Notice, now: float) -> None:
        group = self.registry.find_group_by_id(notice.leadership_id)
        match notice:
            case el.LeadershipAcquired():
                if group is not None:
                    self._out.requests.append(LoadGroup(group, notice.term, notice.previous_leader_until))
            case el.LeadershipHeldElsewhere():
                if group is not None:
                    self._send_elsewhere(group.subscription, notice.leadership_id, notice.address)
            case el.LeadershipLost():
                self._step_down(notice.leadership_id, "lost the leadership")
            case _:
                assert_never(notice)

    def _send_elsewhere(self, subscription: Subscription, group_id: int, address: str) -> None:
        """Send all borrowers that wait for that group's leader to the node that leads it."""
        for received, borrower_id in self.registry.send_on(subscription):
            self._out.sends.append((received.agent, LeaderConnectResponse(borrower_id, 0, group_id, address)))

    def _apply_desired_state(self, event: NodeDesiredStateRead, now: float) -> None:
        """Resign what must not be led any more; borrowers are sent to its leader, or request it from another node."""
        if self._stop_by is not None:
            return
        was_draining = self._restrictions.draining
        for group_id in self._restrictions.apply(event.is_draining, event.step_down, self.election.leaderships(), now):
            self._step_down(group_id, "moved by an operator")
            self._elect(el.Resign(group_id), now)
        if event.is_draining:
            self._elect(el.ResignAll(), now)
        elif was_draining:
            self._elect(el.StartCampaign(MAINTENANCE), now)

    def _on_group_loaded(self, answer: GroupLoadCompleted, now: float) -> None:
        request, group, term = answer.request, answer.request.group, answer.request.term
        if self.election.trusted_term(group.group_id, now) != term:
            self._elect(Tick(), now)  # a renewal's answer would extend a trust without a leader
            return
        if answer.rows is None:
            self._elect(el.Resign(group.group_id), now)
            if answer.is_deleted:
                problem = f"group {group.group_id} is deleted, or a failover has lost it"
                self._refuse(self.registry.remove_group(group), group.group_id, BorrowerEndReason.DELETED, problem, now)
            return
        leader = GroupLeader(
            answer.group or group, term, answer.rows, self.settings, now, request.previous_leader_until
        )
        self.leaders[group.group_id] = leader
        takeover = transient_record(group.group_id, term, TAKEOVER, f"node {self.ref.name} leads")
        self._add_watch_events(group.group_id, [takeover])
        self._run_leader(leader, Tick(), now)
        self._dead_agents.watch(leader.streams.absent_holders(), term, now)
        self._admit(group, now)

    def _step_down(self, group_id: int, reason: str) -> None:
        """Drop the leader; its borrowers look for the next one and keep their streams."""
        leader = self.leaders.pop(group_id, None)
        if leader is not None:
            self._add_watch_events(group_id, [transient_record(group_id, leader.term, STEP_DOWN, reason)])
            self._out.sends.extend(leader.invalidations(reason))
            self._wake.pop(group_id, None)
            self._pending_writes.pop(group_id, None)

    # --- running leaders ----------------------------------------------------------------------------------------------

    def _run_led(self, group_ids: Iterable[int], event: group_events.Event, now: float) -> None:
        for leader in [self.leaders[group_id] for group_id in group_ids if group_id in self.leaders]:
            self._run_leader(leader, event, now)

    def _run_leader(self, leader: GroupLeader, event: group_events.Event, now: float) -> None:
        group_id = leader.group.group_id
        if self.election.trusted_term(group_id, now) != leader.term:
            # A renewal's answer may still extend the trust window: by then this leader would have missed the event.
            self._elect(Tick(), now)
            return
        try:
            outcome = leader.decide(event, now)
        except Exception:  # noqa: BLE001 a broken invariant costs its own group a new leader, and affects no other
            self._out.violations.append(f"group {group_id}, {event}:\n{traceback.format_exc()}")
            self._step_down(group_id, "its leader broke a rule of its own")
            self._elect(el.Resign(group_id), now)
            return
        if not self.election.is_silent(group_id, now):
            self._out.sends.extend(outcome.sends)
        self._out.violations.extend(f"group {group_id}: {violation}" for violation in outcome.invariant_violations)
        self._add_watch_events(group_id, outcome.history)
        self._wake[group_id] = _NEVER if outcome.wake_at is None else outcome.wake_at
        if outcome.changes or outcome.needs_stream_sync:
            pending_writes = self._pending_writes.setdefault(group_id, PendingWrites(leader.term, leader.streams.get))
            pending_writes.add(outcome.changes, outcome.needs_stream_sync)
        if outcome.stop_reason is not None:
            self._step_down(group_id, outcome.stop_reason)
            self._elect(el.Resign(group_id), now)

    def _commit(self) -> None:
        if self._committing or not self._pending_writes:
            return
        self._committing = True
        self._out.requests.append(CommitWrites(take_batch(self._pending_writes)))

    def _on_commit_answered(self, answer: WritesCommitted | WritesCommitFailed, now: float) -> None:
        self._committing = False
        for nth, writes in enumerate(answer.request.batch):
            result = answer if isinstance(answer, WritesCommitFailed) else answer.results[nth]
            if result.is_outcome_unknown:
                # The rows are unknown now: the next leader, perhaps this node again, reads them.
                if self._is_current_term(writes):
                    self._step_down(writes.group_id, "a commit's outcome is unknown")
                    self._elect(el.Resign(writes.group_id), now)
            elif isinstance(result, WritesCommitFailed):
                self._answer_leader(writes, group_events.WritesNotCommitted(writes), now)
            else:
                self._add_watch_events(writes.group_id, result.history)
                self._answer_leader(writes, group_events.WritesCommitted(result), now)

    def _read_streams_again(self, changed: StreamsChanged, now: float) -> None:
        """Pass the change to the leaders it concerns; completed epochs concern atomic groups only."""
        for leader in tuple(self.leaders.values()):
            group = leader.group
            if changed.group_id in (None, group.group_id) and (group.options.atomic or not changed.is_epochs_only):
                self._run_leader(leader, group_events.StreamsChanged(), now)

    def _is_current_term(self, writes: GroupWrites) -> bool:
        leader = self.leaders.get(writes.group_id)
        return leader is not None and leader.term == writes.term

    def _answer_leader(self, writes: GroupWrites, event: group_events.Event, now: float) -> None:
        """Pass an answer to the leader that wrote it, not to its successor on this same node."""
        if self._is_current_term(writes):
            self._run_leader(self.leaders[writes.group_id], event, now)

    # --- time -------------------------------------------------------------------------------------------------------

    def _pass_time(self, now: float) -> None:
        self._elect(Tick(), now)
        self._dead_agents.expire(now)
        self._parts.expire(now)
        for group_id in [g for g, at in self._wake.items() if at <= now]:
            if (leader := self.leaders.get(group_id)) is not None:
                self._wake[group_id] = _NEVER
                self._run_leader(leader, Tick(), now)
        for group in self.registry.take_idle_groups(now, self.settings.leader_idle_timeout_s, self.leaders):
            self._elect(el.Resign(group.group_id), now)

    def _shut_down(self, now: float) -> bool:
        """Shut down: once writes are done, release every lease and the borrowers; return whether that is done."""
        if self._stop_by is None:
            return False
        pending = self._committing or any(leader.pending_changes() for leader in self.leaders.values())
        if not self._releasing_all and (not pending or now >= self._stop_by):
            self._releasing_all = True
            self._elect(el.ResignAll(), now)
            for group_id in tuple(self.leaders):
                self._step_down(group_id, "the node is shutting down")
        is_released = not self.election.is_busy() or now >= self._stop_by + self.settings.lease_margin_s
        return self._releasing_all and is_released
