"""Executes a node's database requests on the group store, and makes their answer events.

The process, the simulator and the tests all use it, so that they make the same calls of a store and return the same
answers. Pure but for the store; the caller decides when, on which thread, and what a failure is.
"""

from __future__ import annotations

from typing import assert_never

from sublet_leader.node.events import (
    ClaimLeadership,
    CommitWrites,
    DatabaseAnswer,
    DatabaseRequest,
    FindOrCreateGroup,
    GroupFoundOrCreated,
    GroupLoadCompleted,
    LeaderLookupCompleted,
    LeadershipClaimCompleted,
    LeadershipReleaseCompleted,
    LeadershipRenewalCompleted,
    LoadGroup,
    LookUpLeader,
    ReadSessionEpoch,
    ReleaseLeaderships,
    RenewLeaderships,
    SessionEpochRead,
    WritesCommitFailed,
    WritesCommitted,
)
from sublet_protocol.domain.errors import PermissionDenied, StaleTerm, TooManyGroups, UndeclaredQueue, UsageError
from sublet_storage.groups.coordinator.store import GroupStore
from sublet_storage.node_directory import NodeIncarnation


def execute(
    request: DatabaseRequest, store: GroupStore, ref: NodeIncarnation, lease_s: float, jitter_s: float = 0.0
) -> DatabaseAnswer:
    """Execute the request for the node `ref` and return the event that answers it, also for an undeclared queue, an
    invalid value or a lost term. Raise what the store raises if the database did not answer: then `failure_answer`
    makes the event.

    `jitter_s`: seconds that the loser of an election adds before it tries again.
    """
    match request:
        case FindOrCreateGroup():
            return _open(request, store)
        case ClaimLeadership():
            claimed = store.claim(request.leadership_id, ref, lease_s, request.lock_key, request.rival)
            return LeadershipClaimCompleted(request, claimed, jitter_s)
        case RenewLeaderships():
            return LeadershipRenewalCompleted(request, store.renew(ref, request.terms, lease_s, request.lock_key))
        case ReleaseLeaderships():
            return LeadershipReleaseCompleted(request, store.release(ref, request.terms))
        case LoadGroup():
            return _load(request, store)
        case CommitWrites():
            return WritesCommitted(request, store.commit(request.batch))
        case LookUpLeader():
            return _look_up_leader(request, store)
        case ReadSessionEpoch():
            return _read_epoch(request, store)
        case _:
            assert_never(request)


def failure_answer(request: DatabaseRequest, *, unknown: bool, jitter_s: float = 0.0) -> DatabaseAnswer:
    """Return the event for a request that the database did not answer. `unknown`: it may have been executed all the
    same."""
    match request:
        case FindOrCreateGroup():
            return GroupFoundOrCreated(request, None, "the database did not answer")
        case ClaimLeadership():
            return LeadershipClaimCompleted(request, None, jitter_s)
        case RenewLeaderships():
            return LeadershipRenewalCompleted(request, None)
        case ReleaseLeaderships():
            return LeadershipReleaseCompleted(request, None)
        case LoadGroup():
            return GroupLoadCompleted(request, None)
        case CommitWrites():
            return WritesCommitFailed(request, unknown)
        case LookUpLeader():
            return LeaderLookupCompleted(request, is_answered=False)
        case ReadSessionEpoch():
            return SessionEpochRead(request, None)
        case _:
            assert_never(request)


def _read_epoch(request: ReadSessionEpoch, store: GroupStore) -> SessionEpochRead:
    name = request.subscription, request.session
    try:
        if request.principal is not None:
            store.bind_session(*name, request.principal)
    except (PermissionDenied, UsageError) as problem:
        return SessionEpochRead(request, store.read_last_session_epoch(*name), str(problem))
    return SessionEpochRead(request, store.read_last_session_epoch(*name))


def _open(request: FindOrCreateGroup, store: GroupStore) -> GroupFoundOrCreated:
    if request.group_id is not None:
        group = store.find_group(request.group_id)
        error = f"group {request.group_id} is deleted, or a failover has lost it"
        return GroupFoundOrCreated(request, group, error, is_final=group is None)
    try:
        group = store.open_group(request.subscription, request.starting_position, request.principal)
        return GroupFoundOrCreated(request, group)
    except (UndeclaredQueue, UsageError) as problem:
        return GroupFoundOrCreated(request, None, str(problem), is_final=True)
    except TooManyGroups as problem:  # its borrowers retry, and get it in a while
        return GroupFoundOrCreated(request, None, str(problem), is_limited=True)


def _load(request: LoadGroup, store: GroupStore) -> GroupLoadCompleted:
    group = store.find_group(request.group.group_id)
    if group is None or group.subscription != request.group.subscription:  # lost by a failover, its id used again
        return GroupLoadCompleted(request, None, is_deleted=True)
    try:
        return GroupLoadCompleted(request, store.load(request.group.group_id, request.term), group=group)
    except StaleTerm:
        return GroupLoadCompleted(request, None)


def _look_up_leader(request: LookUpLeader, store: GroupStore) -> LeaderLookupCompleted:
    group = store.find_live_group(request.subscription)
    claim = None if group is None else store.read_leaderships((group.group_id,)).get(group.group_id)
    return LeaderLookupCompleted(request, group, claim)
