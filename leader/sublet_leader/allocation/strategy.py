"""The interface of allocation strategies: input, plan, and the check of a plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from sublet_protocol.domain.errors import UsageError


class StreamLoad(Struct, frozen=True):
    """The load of a stream on its holder, as observed recently; it should be smoothed over some seconds.

    `bytes_per_s`: consumed by its holder. `lag`: messages behind the head, below 0 where unknown.
    """

    bytes_per_s: float
    lag: int = -1


class AllocationPlan(Struct, frozen=True):
    """What to do now. `grants`: (stream, borrower) by stream; `revokes`: streams to take back, ascending. `moves`:
    (stream, borrower) of streams that are being revoked, by this plan or before it: where they are granted in the
    transaction that releases them, if no other plan was made by then; a later plan grants those that are left out."""

    grants: tuple[tuple[int, str], ...] = ()
    revokes: tuple[int, ...] = ()
    moves: tuple[tuple[int, str], ...] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self.grants or self.revokes)


class AllocationInput(Struct, frozen=True):
    """The input for one group, now. The constructor raises `UsageError` if its parts contradict each other.

    `holders`: stream -> its borrower; streams of borrowers without a weight (leaving, not yet back) are left out of
    account. `free_streams`: streams that may be granted now. `weights`: the members, each above 0. `movable_streams`:
    what may be revoked now (None: everything held). `moving_streams`: streams already being revoked: no longer their
    holder's, not free yet; they may still be listed in `holders`. `last_holders`: free stream -> the member that is the
    best place for it, because it or its process had it last. `loads`: stream -> its load, as far as it is known.
    """

    holders: Mapping[int, str]
    free_streams: Collection[int]
    weights: Mapping[str, float]
    movable_streams: Collection[int] | None = None
    moving_streams: Collection[int] = ()
    last_holders: Mapping[int, str] = field(default_factory=dict)
    loads: Mapping[int, StreamLoad] = field(default_factory=dict)

    def __post_init__(self) -> None:
        free = set(self.free_streams)
        if twice := free & self.holders.keys():
            raise UsageError(
                f"stream {min(twice)} is both held by {self.holders[min(twice)]!r} and free; it is one of the two."
            )
        if twice := free.intersection(self.moving_streams):
            raise UsageError(f"stream {min(twice)} is both free and being revoked; it is free once that has ended.")
        for borrower, weight in self.weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise UsageError(
                    f"borrower {borrower!r} has weight {weight}: a weight is a finite number above 0. "
                    "Leave out borrowers that should hold nothing."
                )

    def streams_by_member(self) -> dict[str, list[int]]:
        """Return {member: streams it holds and is not already losing}; every member is listed."""
        holdings: dict[str, list[int]] = {borrower: [] for borrower in self.weights}
        moving = set(self.moving_streams)
        for stream_id, borrower in self.holders.items():
            if borrower in holdings and stream_id not in moving:
                holdings[borrower].append(stream_id)
        return holdings

    def revocable_streams(self) -> Container[int]:
        """Return the held streams that may be revoked now, for membership tests."""
        return self.holders.keys() if self.movable_streams is None else frozenset(self.movable_streams)


class AllocationStrategy(Protocol):
    """Decides which member should hold which stream. Pure and deterministic: the order of the input does not matter."""

    def plan(self, allocation_input: AllocationInput) -> AllocationPlan:
        """Return what to grant and what to revoke now."""
        ...


def validate_plan(plan: AllocationPlan, allocation_input: AllocationInput) -> AllocationPlan:
    """Return the plan, if it can be carried out; raises `UsageError` that names what is wrong with it.

    It may leave streams free and surpluses where they are, but only grant what is free, to a member, once, only revoke
    what is held, may move and is not already moving, once, and only name a new holder of what is being revoked.
    """
    if not isinstance(plan, AllocationPlan):
        raise UsageError(f"a strategy answered {plan!r}: it must answer an AllocationPlan.")
    free, moving, revocable = (
        set(allocation_input.free_streams),
        set(allocation_input.moving_streams),
        allocation_input.revocable_streams(),
    )
    leaving = moving.union(plan.revokes)
    _check_new_holders("grant", plan.grants, free, allocation_input, "not free: only free streams can be granted")
    _check_new_holders("move", plan.moves, leaving, allocation_input, "not being revoked: revoke it in the same plan")
    _refuse_repeats("revoke", plan.revokes)
    for stream_id in plan.revokes:
        if stream_id not in allocation_input.holders or stream_id in moving:
            raise UsageError(f"a plan revokes stream {stream_id}, which is not held, or is being revoked already.")
        if stream_id not in revocable:
            raise UsageError(
                f"a plan revokes stream {stream_id}, which may not move yet; `movable_streams` says which may."
            )
    return plan


def _check_new_holders(
    verb: str, pairs: Sequence[tuple[int, str]], allowed: Container[int], given: AllocationInput, problem: str
) -> None:
    _refuse_repeats(verb, (stream_id for stream_id, _ in pairs))
    for stream_id, borrower in pairs:
        if stream_id not in allowed:
            raise UsageError(f"a plan {verb}s stream {stream_id}, which is {problem}.")
        if borrower not in given.weights:
            raise UsageError(f"a plan {verb}s stream {stream_id} to {borrower!r}, who is no member of the group.")


def _refuse_repeats(verb: str, streams: Iterable[int]) -> None:
    visited: set[int] = set()
    for stream_id in streams:
        if stream_id in visited:
            raise UsageError(f"a plan {verb}s stream {stream_id} twice: once is enough.")
        visited.add(stream_id)
