"""What a node's request to the database comes to: the store's call, and the event that answers it.

One place, so that the process, the simulator and the tests ask the same things of a store and hear the same answers.
Pure but for the store; the caller decides when, on which thread, and what a failure is.
"""

from __future__ import annotations

from typing import assert_never

from sublet_leader.node.events import (
    Claimed,
    ClaimLeadership,
    Commit,
    DatabaseAnswer,
    Load,
    Loaded,
    Look,
    Looked,
    NotWritten,
    Open,
    Opened,
    Released,
    ReleaseLeaderships,
    Renewed,
    RenewLeaderships,
    Request,
    Written,
)
from sublet_protocol.domain.errors import LostLeadership, UndeclaredQueue
from sublet_storage.groups.coordinator.store import GroupStore
from sublet_storage.nodes import NodeRef


def execute(request: Request, store: GroupStore, ref: NodeRef, lease_s: float, jitter_s: float = 0.0) -> DatabaseAnswer:
    """Do it for the node `ref`. Answers that are no failure (an undeclared queue, a lost term) are events too;
    raises what the store raises where the database did not answer: then `failed` is what the node is to hear.

    `jitter_s`: seconds that the loser of an election adds before it tries again.
    """
    match request:
        case Open():
            return _open(request, store)
        case ClaimLeadership():
            return Claimed(request, store.claim(request.leadership_id, ref, lease_s), jitter_s)
        case RenewLeaderships():
            return Renewed(request, store.renew(ref, request.terms, lease_s))
        case ReleaseLeaderships():
            return Released(request, store.release(ref, request.terms))
        case Load():
            return _load(request, store)
        case Commit():
            return Written(request, store.commit(request.batch))
        case Look():
            return _look(request, store)
        case _:
            assert_never(request)


def failed(request: Request, *, unknown: bool, jitter_s: float = 0.0) -> DatabaseAnswer:
    """What the node hears where the database did not answer. `unknown`: it may have done it all the same."""
    match request:
        case Open():
            return Opened(request, None, "the database did not answer")
        case ClaimLeadership():
            return Claimed(request, None, jitter_s)
        case RenewLeaderships():
            return Renewed(request, None)
        case ReleaseLeaderships():
            return Released(request, None)
        case Load():
            return Loaded(request, None)
        case Commit():
            return NotWritten(request, unknown)
        case Look():
            return Looked(request, answered=False)
        case _:
            assert_never(request)


def _open(request: Open, store: GroupStore) -> Opened:
    if request.group_id is not None:
        group = store.find_group(request.group_id)
        return Opened(request, group, f"group {request.group_id} is deleted", final=group is None)
    try:
        return Opened(request, store.open_group(request.subscription, request.start))
    except UndeclaredQueue as problem:
        return Opened(request, None, str(problem), final=True)


def _load(request: Load, store: GroupStore) -> Loaded:
    group = store.find_group(request.group.group_id)
    if group is None or group.subscription != request.group.subscription:  # lost by a failover, and its id given again
        return Loaded(request, None, deleted=True)
    try:
        return Loaded(request, store.load(request.group.group_id, request.term), group=group)
    except LostLeadership:
        return Loaded(request, None)


def _look(request: Look, store: GroupStore) -> Looked:
    group = store.live_group(request.subscription)
    claim = None if group is None else store.look((group.group_id,)).get(group.group_id)
    return Looked(request, group, claim)
