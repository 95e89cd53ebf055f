"""Checks the rights of sessions' commands, and the principals of agents; nothing without authentication."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

from sublet_leader.group.events import MemberRightRevoked
from sublet_leader.group.machine import GroupLeader
from sublet_leader.node.events import GroupFoundOrCreated, GroupLeaderEvent, SessionEpochRead
from sublet_leader.node.group_event_publisher import parse_leader_query
from sublet_protocol.domain.access.rights import ALL, Right
from sublet_protocol.domain.errors import PermissionDenied, Unavailable, UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.gate.caller_turns import CallerTurns, SlicedWork
from sublet_protocol.gate.gate import AccessGate, Caller
from sublet_protocol.messages.agent_secret import parse_agent_id
from sublet_protocol.messages.borrower_leader import Disconnect, LeaderWanted, ToLeader
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine


class CallerAuthorizer:
    """Checks callers, on the node's loop. `publisher` has the subscriptions of each subscriber. `end` is called with
    the event for each member that has lost the right to be one."""

    def __init__(self, gate: AccessGate, publisher: NodeSideMachine, end: Callable[[GroupLeaderEvent], None]) -> None:
        self._gate, self._publisher, self._end = gate, publisher, end
        self._principals: dict[str, str] = {}
        self._unjudged: frozenset[str] = frozenset()
        self._unchecked_leaders: deque[GroupLeader] = deque()
        self._round = object()
        """Another one after each change of the rights."""
        self._rounds_of_batches: dict[str, object] = {}
        self._unchecked: dict[str, object] = {}
        self._turns = CallerTurns()
        self._rechecking: asyncio.Task[None] | None = None

    def check_message(self, subscriber_id: str, message: ToLeader | GroupEventPayload) -> bool:
        """Return whether the message can be checked; False: the rules are too old, and its sender repeats it. Raise
        `PermissionDenied` if the caller may not send it, or the agent is another principal's."""
        try:
            self._check_message(subscriber_id, message)
        except Unavailable:
            return False
        return True

    def _check_message(self, subscriber_id: str, message: ToLeader | GroupEventPayload) -> None:
        caller = self._identify_caller(subscriber_id)
        match message:
            case _ if caller.principal is None:
                return
            case LeaderWanted():
                _check_group(caller, Right.JOIN, message.subscription)
            case Disconnect(more=True) if not caller.may_somewhere(Right.JOIN):
                raise caller.denied_error(Right.JOIN, ALL)
            case GroupEventPayload():
                subscription = parse_leader_query(message)
                caller.check(Right.WATCH, subscription.filter, subscription.group)

    def check_agent(self, subscriber_id: str) -> None:
        """Raise `PermissionDenied` if the subscriber's agent is another principal's. Do not bind the agent to the
        caller: one that only polls has not registered it."""
        caller, agent = self._gate.get_caller(), parse_agent_id(subscriber_id)
        if caller.principal is not None and self._principals.get(agent, caller.principal) != caller.principal:
            caller.note_refusal(f"agent {agent}")
            raise _other_agent_error(agent, caller)

    def check_subscribe(self, subscriber_id: str, channel: str, key: str | None) -> None:
        """Raise `PermissionDenied` unless the caller may subscribe to the channel and key."""
        caller = self._identify_caller(subscriber_id)
        self._rounds_of_batches.setdefault(subscriber_id, self._round)
        if caller.principal is not None:
            caller.check_token()
            _check_subscribe(caller, channel, key)

    def recheck_all(self, leaders: Iterable[GroupLeader]) -> None:
        """Have all members and subscribers checked again, as the rights have changed: in slices, and subscribers before
        they get another message. An agent that is away is checked when it comes back, as its principal was dropped."""
        self._unchecked_leaders = deque(leaders)
        agents = {member.agent for leader in self._unchecked_leaders for member in leader.members}
        self._unjudged = frozenset(agents.difference(self._principals))
        self._round = object()
        self._unchecked.update(dict.fromkeys(self._publisher.subscriber_ids, self._round))
        self._begin_rechecking()

    def find_denied_on_return(self, agent: str, leaders: Iterable[GroupLeader]) -> Iterator[GroupLeaderEvent]:
        """Yield the same for an agent that has sent a message, if it was away when the rights changed. Yields nothing
        while the rules are too old: the agent is checked later."""
        if agent not in self._unjudged:
            return
        with contextlib.suppress(Unavailable):
            yield from [event for leader in tuple(leaders) for event in self._judge(leader, {agent}) if event]
            self._unjudged -= {agent}

    def _judge(self, leader: GroupLeader, agents: Collection[str] | None = None) -> Iterator[GroupLeaderEvent | None]:
        """Yield for each member, of these agents if given, what ends it if it has lost its right. Raise
        `Unavailable`."""
        group, allowed = leader.group.subscription, dict[str, bool]()
        for member in leader.members:
            principal = self._principals.get(member.agent)
            if principal is None or (agents is not None and member.agent not in agents):
                continue
            caller = self._gate.make_caller(principal, member.agent)
            if principal not in allowed:
                allowed[principal] = caller.may(Right.JOIN, group.filter, group.group)
            if allowed[principal]:
                yield None
                continue
            problem = caller.denied_error(Right.JOIN, group.filter, group.group)
            yield GroupLeaderEvent(leader.group.group_id, MemberRightRevoked(member.borrower_id, str(problem)))

    def on_subscribed(self, subscriber_id: str) -> None:
        """Have the subscriber checked again, if the rights have changed while its batch was checked."""
        if self._rounds_of_batches.pop(subscriber_id, self._round) is not self._round:
            self._unchecked[subscriber_id] = object()
            self._begin_rechecking()

    async def recheck(self, subscriber_id: str) -> None:
        """Disconnect the subscriber if it may no longer watch what it subscribed to; when it reconnects, that is
        rejected."""
        if subscriber_id in self._unchecked:
            caller = self._principals.get(parse_agent_id(subscriber_id), "")
            async with SlicedWork(self._turns, caller) as turn:
                await self._recheck_in_slices(subscriber_id, turn)

    def _begin_rechecking(self) -> None:
        if self._rechecking is None or self._rechecking.done():
            self._rechecking = asyncio.get_running_loop().create_task(self._recheck_all())

    async def _recheck_all(self) -> None:
        async with SlicedWork(self._turns, "") as turn:
            while self._unchecked_leaders or self._unchecked:
                if self._unchecked_leaders:
                    await self._recheck_members(self._unchecked_leaders.popleft(), turn)
                else:
                    await self._recheck_in_slices(next(iter(self._unchecked)), turn)
                await turn.spend(1)

    async def _recheck_members(self, leader: GroupLeader, turn: SlicedWork) -> None:
        try:
            for denied in self._judge(leader):
                if denied is not None:
                    self._end(denied)
                await turn.spend(1)
        except Unavailable:  # the rules are too old: each agent is checked when it sends something
            self._unjudged |= {member.agent for member in leader.members}

    async def _recheck_in_slices(self, subscriber_id: str, turn: SlicedWork) -> None:
        while (since := self._unchecked.get(subscriber_id)) is not None:
            is_allowed = await self._may_have_all(subscriber_id, turn)
            if not is_allowed:
                self._publisher.expel(subscriber_id)
            if not is_allowed or self._unchecked.get(subscriber_id) is since:
                self._unchecked.pop(subscriber_id, None)

    async def _may_have_all(self, subscriber_id: str, turn: SlicedWork) -> bool:
        """Return whether the subscriber may have all that it subscribed to. Streams are checked by no key."""
        subscriptions, agent = self._publisher.subscriptions(subscriber_id), parse_agent_id(subscriber_id)
        principal = self._principals.get(agent)
        if principal is None:
            return not subscriptions
        caller = self._gate.make_caller(principal, agent)
        for channel, keys in subscriptions.items():
            for key in tuple(keys) if channel == Channel.GROUP else (None,):
                try:
                    _check_subscribe(caller, channel, key)
                except (PermissionDenied, Unavailable):
                    return False
                await turn.spend(1)
        return True

    def find_principal(self, agent: str) -> str | None:
        """Return the principal of the agent; None if it is unknown."""
        return self._principals.get(agent)

    def note_refusal(self, answer: SessionEpochRead | GroupFoundOrCreated) -> None:
        """Record in the audit log that a principal used another's session name, or had too many groups created.
        Thread-safe."""
        principal = answer.request.principal
        if principal is None:
            return
        if isinstance(answer, GroupFoundOrCreated):
            if answer.is_limited:
                self._gate.make_caller(principal, "", "create a group").note_refusal(str(answer.request.subscription))
        elif answer.denied is not None:
            subject = f"session {answer.request.session!r} of {answer.request.subscription}"
            self._gate.make_caller(principal, "", "take over a session").note_refusal(subject)

    def _identify_caller(self, subscriber_id: str) -> Caller:
        """Return the caller, and bind the agent to its principal. Raise `PermissionDenied` if it is another's."""
        caller = self._gate.get_caller()
        agent = parse_agent_id(subscriber_id)
        if caller.principal is not None and self._principals.setdefault(agent, caller.principal) != caller.principal:
            raise _other_agent_error(agent, caller)
        return caller

    def forget(self, subscriber_ids: Collection[str]) -> None:
        """Drop the principals of agents without a subscriber left."""
        connected_agents = {parse_agent_id(subscriber_id) for subscriber_id in self._publisher.subscriber_ids}
        for agent in {parse_agent_id(subscriber_id) for subscriber_id in subscriber_ids} - connected_agents:
            self._principals.pop(agent, None)


def _other_agent_error(agent: str, caller: Caller) -> PermissionDenied:
    return PermissionDenied(f"agent {agent} is not {caller.principal}'s. A new session has another agent.")


def _check_subscribe(caller: Caller, channel: str, key: str | None) -> None:
    if channel == Channel.GROUP:
        if key is None:
            caller.check(Right.WATCH)
        else:
            _check_group(caller, Right.WATCH, key)
    elif channel == Channel.STREAM and not caller.may_somewhere(Right.JOIN):
        raise caller.denied_error(Right.JOIN, ALL)


def _check_group(caller: Caller, right: Right, subscription: str) -> None:
    try:
        group = Subscription.parse(subscription)
    except UsageError:
        if right is Right.WATCH:
            raise
        return  # the machine denies it, with the error
    caller.check(right, group.filter, group.group)
