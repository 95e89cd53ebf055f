"""A node: the leaders that live in it, which groups it leads, and where to find those it does not. Pure.

The flow of a first subscriber: `leader_wanted` comes in, the group is opened, its leadership claimed, its rows loaded,
a `GroupLeader` made and the message given to it. Whoever asks meanwhile waits. Where another node leads, the answer is
its address. Writes of all groups leave in one `Commit` at a time; what comes up meanwhile is the next.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from sublet_leader import election as el
from sublet_leader.group import events as group_events
from sublet_leader.group.history import STEP_DOWN, Happened, unrecorded
from sublet_leader.group.machine import GroupLeader
from sublet_leader.node.events import (
    Asked,
    Begin,
    Claimed,
    ClaimLeadership,
    Commit,
    DatabaseAnswer,
    Heard,
    Load,
    Loaded,
    Look,
    Looked,
    NodeEvent,
    NodeOutcome,
    NotWritten,
    Open,
    Opened,
    Ordered,
    Released,
    ReleaseLeaderships,
    Renewed,
    RenewLeaderships,
    Request,
    RevokeWanted,
    Shutdown,
    StreamsChanged,
    Tick,
    Written,
)
from sublet_leader.node.group_registry import Registry
from sublet_leader.node.group_watch import Inquiries, Whereabouts
from sublet_leader.node.leadership_restrictions import Obedience
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.messages import (
    Disconnect,
    EndReason,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    ToBorrower,
    ToLeader,
    UpdateProgress,
)
from sublet_storage.groups.model.records import MAINTENANCE, TAKEOVER, Entry, Group, GroupWrites, HistoryRecord, Start
from sublet_storage.nodes import NodeRef

_NEVER = float("inf")


@dataclass(slots=True)
class _Unwritten:
    """What one group wants in the next commit."""

    term: int
    entries: list[Entry] = field(default_factory=list)
    renew: bool = False


@dataclass(slots=True)
class _Out:
    """An outcome in the making."""

    requests: list[Request] = field(default_factory=list)
    sends: list[tuple[str, ToBorrower]] = field(default_factory=list)
    stories: list[str] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    answers: list[Whereabouts] = field(default_factory=list)


class Node:
    """One life of one node. Borrowers know it by its address, the database by its incarnation."""

    def __init__(self, ref: NodeRef, settings: LeaderSettings) -> None:
        self.ref, self.settings = ref, settings
        self.election = el.Election(settings, ref.incarnation)
        self.leaders: dict[int, GroupLeader] = {}
        self.registry = Registry()
        self._wake: dict[int, float] = {}
        self._election_wake = _NEVER
        self._unwritten: dict[int, _Unwritten] = {}
        self._committing = False
        self._stop_by: float | None = None
        self._releasing_all = False
        self._orders = Obedience(settings.lease_s)
        self._inquiries = Inquiries()
        self._out = _Out()

    # --- the one door -----------------------------------------------------------------------------------------------

    def decide(self, event: NodeEvent, now: float) -> NodeOutcome:
        """Answer one event."""
        self._out = _Out()
        match event:
            case Begin():
                self._elect(el.Want(MAINTENANCE), now)
            case Heard():
                self._hear(event, now)
            case Asked():
                self._asked(event)
            case RevokeWanted():
                leader = self.leaders.get(event.group_id)
                if leader is not None:
                    self._give(leader, group_events.RevokeWanted(event.stream_ids, event.reason), now)
            case StreamsChanged():
                self._look_anew(event, now)
            case Ordered():
                self._ordered(event, now)
            case Shutdown():
                self._stop_by = event.by
            case Tick():
                self._pass_time(now)
            case _:
                self._database_answered(event, now)
        self._commit()
        stopped = self._wind_down(now)
        out = self._out
        return NodeOutcome(
            tuple(out.requests),
            tuple(out.sends),
            self._wake_at(),
            stopped,
            tuple(out.stories),
            tuple(out.happened),
            tuple(out.answers),
        )

    def _database_answered(self, event: DatabaseAnswer, now: float) -> None:
        match event:
            case Opened():
                self._opened(event, now)
            case Claimed() | Renewed() | Released():
                self._elect(event.heard(), now)
            case Loaded():
                self._loaded(event, now)
            case Written() | NotWritten():
                self._commit_answered(event, now)
            case Looked():
                self._looked(event)
            case _:
                assert_never(event)

    def _wake_at(self) -> float:
        stop = _NEVER if self._stop_by is None else self._stop_by
        stop += self.settings.margin_s if self._releasing_all else 0.0
        return min([self._election_wake, stop, self.registry.wake_at(), *self._wake.values()])

    def _send(self, agent: str, message: ToBorrower) -> None:
        self._out.sends.append((agent, message))

    # --- those who watch --------------------------------------------------------------------------------------------

    def _tell(self, group_id: int, lines: Sequence[HistoryRecord]) -> None:
        group = self.registry.group_by_id(group_id)
        if lines and group is not None:
            self._out.happened.extend(Happened(str(group.subscription), line) for line in lines)

    def _asked(self, asked: Asked) -> None:
        if self._inquiries.ask(asked.subscription, asked.subscriber_id):
            self._out.requests.append(Look(asked.subscription))

    def _looked(self, answer: Looked) -> None:
        wanted = answer.request.subscription
        if not answer.answered:
            self._inquiries.unanswered(wanted)
            return
        claim = answer.claim
        leader = None if claim is None else self.leaders.get(claim.leadership_id)
        here = None if leader is None or claim is None or claim.term != leader.term else leader.members
        self._out.answers.extend(self._inquiries.answered(wanted, answer.group, claim, here))
        if claim is not None and claim.remaining_s > 0 and claim.node.incarnation != self.ref.incarnation:
            self._send_elsewhere(wanted, claim.leadership_id, claim.node.address)

    # --- messages ---------------------------------------------------------------------------------------------------

    def _hear(self, heard: Heard, now: float) -> None:
        message = heard.message
        if isinstance(message, LeaderWanted):
            self._seek(heard, message, now)
        elif isinstance(message, Ping):
            for borrower_id in message.borrower_ids:
                ping = Ping((borrower_id,), message.sent_at)
                self._to_leader(borrower_id, Heard(heard.agent, ping), now)
        elif not self._can_wait(message):
            if isinstance(message, Disconnect) and not message.term:
                self.registry.wait_no_more(heard.agent, message.borrower_id)
            self._to_leader(message.borrower_id, heard, now)

    def _can_wait(self, message: ToLeader) -> bool:
        """A node that stops writes no more progress but last words, or it would never come to an end: the next leader
        learns it from the reclaim."""
        passing = isinstance(message, UpdateProgress) and not any(p.final for p in message.streams)
        return passing and self._stop_by is not None

    def _to_leader(self, borrower_id: str, heard: Heard, now: float) -> None:
        """A borrower that no leader here knows is told so; a leader outside its trust window answers nothing."""
        group_id = self.registry.home_of(heard.agent, borrower_id)
        leader = self.leaders.get(group_id) if group_id is not None else None
        if leader is None:
            self._send(heard.agent, Invalidate(borrower_id, 0, EndReason.RETRY, "this node does not lead its group"))
        else:
            self._give(leader, group_events.Heard(heard.agent, heard.message), now)

    def _seek(self, heard: Heard, wanted: LeaderWanted, now: float) -> None:
        """Lead the group, find out who does, or say why nobody will."""
        try:
            subscription = Subscription.parse(wanted.subscription)
            start = Start.parse(wanted.start)
        except (UsageError, ValueError) as problem:
            self._send(heard.agent, Invalidate(wanted.borrower_id, 0, EndReason.DENIED, str(problem)))
            return
        if self._stop_by is not None:
            return
        group = self.registry.group(subscription)
        self.registry.wait(subscription, heard, wanted.borrower_id, now)
        if self._orders.forbid(group, now):
            if self._inquiries.ask(subscription, None):
                self._out.requests.append(Look(subscription))
        elif group is None:
            if self.registry.begin_opening(subscription):
                self._out.requests.append(Open(subscription, start, wanted.group_id))
        elif group.group_id in self.leaders:
            self._admit(group, now)
        else:
            self._elect(el.Want(group.group_id), now)

    def _opened(self, answer: Opened, now: float) -> None:
        request, group = answer.request, answer.group
        stranger = group is not None and group.subscription != request.subscription
        self.registry.opened(request.subscription, None if stranger else group)
        if group is not None and not stranger:
            if self._stop_by is None and not self._orders.forbid(group, now):
                self._elect(el.Want(group.group_id), now)
        elif answer.final or stranger:
            reason = EndReason.DENIED if request.group_id is None else EndReason.DELETED
            waiting = [heard for heard, _ in self.registry.take_waiting(request.subscription)]
            self._refuse(waiting, request.group_id, reason, answer.problem, now)

    def _refuse(
        self, waiting: Iterable[Heard], group_id: int | None, reason: EndReason, problem: str, now: float
    ) -> None:
        """End those who asked for that very group; whoever asked for another is looked after anew."""
        for heard in waiting:
            wanted = heard.message
            assert isinstance(wanted, LeaderWanted)
            if wanted.group_id == group_id:
                self._send(heard.agent, Invalidate(wanted.borrower_id, 0, reason, problem))
            else:
                self._seek(heard, wanted, now)

    def _admit(self, group: Group, now: float) -> None:
        """Give everyone who waited to the group's leader, unless it has fallen silent: nothing is lent to ghosts."""
        leader = self.leaders[group.group_id]
        since = now - self.settings.ping_timeout_s
        for heard, borrower_id in self.registry.take_waiting(group.subscription, since):
            wanted = heard.message
            assert isinstance(wanted, LeaderWanted)
            if wanted.group_id is not None and wanted.group_id > group.group_id:
                continue  # ours must be deleted, which its leader will soon find out; the borrower asks again
            if wanted.group_id not in (None, group.group_id):
                self._send(heard.agent, Invalidate(borrower_id, 0, EndReason.DELETED, f"group {wanted.group_id}"))
                continue
            self.registry.settle(heard.agent, borrower_id, group.group_id)
            self._give(leader, group_events.Heard(heard.agent, wanted), now)

    # --- leadership -------------------------------------------------------------------------------------------------

    def _elect(self, event: el.Event, now: float) -> None:
        outcome = self.election.decide(event, now)
        self._out.requests.extend(ClaimLeadership(claimed, now) for claimed in outcome.claims)
        if outcome.renew:
            self._out.requests.append(RenewLeaderships(outcome.renew, now))
        if outcome.release:
            self._out.requests.append(ReleaseLeaderships(outcome.release))
        self._election_wake = _NEVER if outcome.wake_at is None else outcome.wake_at
        for notice in outcome.notices:
            self._take_notice(notice, now)

    def _take_notice(self, notice: el.Notice, now: float) -> None:
        group = self.registry.group_by_id(notice.leadership_id)
        match notice:
            case el.Led():
                if group is not None:
                    self._out.requests.append(Load(group, notice.term))
            case el.LedElsewhere():
                if group is not None:
                    self._send_elsewhere(group.subscription, notice.leadership_id, notice.address)
            case el.Lost():
                self._step_down(notice.leadership_id, "lost the leadership")
            case _:
                assert_never(notice)

    def _send_elsewhere(self, subscription: Subscription, group_id: int, address: str) -> None:
        """Everyone who waits for that group's leader, to the node that leads it."""
        for heard, borrower_id in self.registry.take_waiting(subscription):
            self._send(heard.agent, LeaderConnectResponse(borrower_id, 0, group_id, address))

    def _ordered(self, orders: Ordered, now: float) -> None:
        """Let go what is not to be led any more; whoever asks for it is sent to its leader, or asks another node."""
        if self._stop_by is not None:
            return
        before = self._orders.draining
        for group_id in self._orders.obey(orders, self.election.led(), now):
            self._step_down(group_id, "an operator wants another node to lead")
            self._elect(el.Unwant(group_id), now)
        if orders.draining:
            self._elect(el.UnwantAll(), now)
        elif before:
            self._elect(el.Want(MAINTENANCE), now)

    def _loaded(self, answer: Loaded, now: float) -> None:
        group, term = answer.request.group, answer.request.term
        if self.election.trusted(group.group_id, now) != term:
            return
        if answer.rows is None:
            self._elect(el.Unwant(group.group_id), now)
            if answer.deleted:
                problem = f"group {group.group_id} is deleted"
                self._refuse(self.registry.forget(group), group.group_id, EndReason.DELETED, problem, now)
            return
        leader = GroupLeader(answer.group or group, term, answer.rows, self.settings, now)
        self.leaders[group.group_id] = leader
        self._tell(group.group_id, [unrecorded(group.group_id, term, TAKEOVER, f"node {self.ref.name} leads")])
        self._give(leader, group_events.Tick(), now)
        self._admit(group, now)

    def _step_down(self, group_id: int, why: str) -> None:
        """Forget the leader; its borrowers look for the next one and keep their streams."""
        leader = self.leaders.pop(group_id, None)
        if leader is not None:
            self._tell(group_id, [unrecorded(group_id, leader.term, STEP_DOWN, why)])
            self._out.sends.extend(leader.dismissals(why))
            self._wake.pop(group_id, None)
            self._unwritten.pop(group_id, None)
            self.registry.unsettle(group_id)

    # --- leaders at work --------------------------------------------------------------------------------------------

    def _give(self, leader: GroupLeader, event: group_events.Event, now: float) -> None:
        group_id = leader.group.group_id
        if self.election.trusted(group_id, now) != leader.term:
            # A renewal's answer may yet come and extend the trust: by then this leader would have missed the event.
            self._elect(el.Tick(), now)
            return
        try:
            outcome = leader.decide(event, now)
        except Exception:  # noqa: BLE001 a broken rule costs its own group a new leader, and nobody else anything
            self._out.stories.append(f"group {group_id}, {event}:\n{traceback.format_exc()}")
            self._step_down(group_id, "its leader broke a rule of its own")
            self._elect(el.Unwant(group_id), now)
            return
        self._out.sends.extend(outcome.sends)
        self._out.stories.extend(f"group {group_id}: {story}" for story in outcome.stories)
        self._tell(group_id, outcome.happened)
        self._wake[group_id] = _NEVER if outcome.wake_at is None else outcome.wake_at
        if outcome.entries or outcome.renew:
            unwritten = self._unwritten.setdefault(group_id, _Unwritten(leader.term))
            unwritten.entries.extend(outcome.entries)
            unwritten.renew = unwritten.renew or outcome.renew
        if outcome.stop is not None:
            self._step_down(group_id, outcome.stop)
            self._elect(el.Unwant(group_id), now)

    def _commit(self) -> None:
        if self._committing or not self._unwritten:
            return
        batch = tuple(GroupWrites(g, u.term, tuple(u.entries), u.renew) for g, u in self._unwritten.items())
        self._unwritten.clear()
        self._committing = True
        self._out.requests.append(Commit(batch))

    def _commit_answered(self, answer: Written | NotWritten, now: float) -> None:
        self._committing = False
        if isinstance(answer, Written):
            for writes, result in zip(answer.request.batch, answer.results, strict=True):
                self._tell(writes.group_id, result.recorded)
                self._inform(writes, group_events.Committed(result), now)
            return
        for writes in answer.request.batch:
            if answer.unknown:
                # Nobody knows what the rows say now: the next leader, perhaps this node again, reads them.
                if self._leads(writes):
                    self._step_down(writes.group_id, "a commit's outcome is unknown")
                    self._elect(el.Unwant(writes.group_id), now)
            else:
                self._inform(writes, group_events.NotWritten(writes.entries), now)

    def _look_anew(self, said: StreamsChanged, now: float) -> None:
        """Completed epochs concern atomic groups alone."""
        for leader in tuple(self.leaders.values()):
            group = leader.group
            if said.group_id in (None, group.group_id) and (group.options.atomic or not said.epochs):
                self._give(leader, group_events.StreamsChanged(), now)

    def _leads(self, writes: GroupWrites) -> bool:
        leader = self.leaders.get(writes.group_id)
        return leader is not None and leader.term == writes.term

    def _inform(self, writes: GroupWrites, event: group_events.Event, now: float) -> None:
        """An answer is only for the leader that wrote it, not for its successor on this same node."""
        if self._leads(writes):
            self._give(self.leaders[writes.group_id], event, now)

    # --- time -------------------------------------------------------------------------------------------------------

    def _pass_time(self, now: float) -> None:
        self._elect(el.Tick(), now)
        for group_id in [g for g, at in self._wake.items() if at <= now]:
            leader = self.leaders.get(group_id)
            if leader is not None:
                self._wake[group_id] = _NEVER
                self._give(leader, group_events.Tick(), now)
        for group in self.registry.take_unasked(now, self.settings.idle_stop_s, self.leaders):
            self._elect(el.Unwant(group.group_id), now)

    def _wind_down(self, now: float) -> bool:
        """On shutdown: once nothing is being written, release every lease, then let the borrowers go."""
        if self._stop_by is None:
            return False
        pending = self._committing or any(leader.pending() for leader in self.leaders.values())
        if not self._releasing_all and (not pending or now >= self._stop_by):
            self._releasing_all = True
            self._elect(el.UnwantAll(), now)
            for group_id in tuple(self.leaders):
                self._step_down(group_id, "the node is shutting down")
        return self._releasing_all and (not self.election.busy() or now >= self._stop_by + self.settings.margin_s)
