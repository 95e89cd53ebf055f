"""The (status, event) pairs that no simulated run need bring about, each with its reason.

Everything else in the machines' tables occurs within a thousand seeds, or `test_seeds` fails. Each pair listed here has
a unit test instead, for every pair of its table: in `tests/unit`, `test_borrower_machine.py` (what is ignored changes
nothing), `test_group_leader_table.py` (each pair has a story, or is an error that tells one) and
`test_election_table.py` (each pair leads where the table says).
"""

from __future__ import annotations

from enum import Enum

from borrower.machine.table import Kind as BorrowerKind
from borrower.machine.table import Status as BorrowerStatus
from leader import election
from leader.group.table import TABLE as ASSIGNMENTS
from leader.group.table import Action, Kind, Status
from tests.simulation.tally import Pair


def _pairs(machine: str, status: Enum, *kinds: Enum) -> set[Pair]:
    return {(machine, status, kind) for kind in kinds}


def _borrower() -> set[Pair]:
    """An agent starts a borrower in the call that makes it, and forgets it in the call that destroys it."""
    unborn = _pairs("borrower", BorrowerStatus.NEW, *(set(BorrowerKind) - {BorrowerKind.START}))
    dead = _pairs("borrower", BorrowerStatus.DESTROYED, *BorrowerKind)
    twice = {("borrower", status, BorrowerKind.START) for status in BorrowerStatus if status is not BorrowerStatus.NEW}
    # No session of the simulator leaves twice, and hardly ever does a leader speak of more to one whom its first answer
    # has not reached.
    leaves_again = _pairs("borrower", BorrowerStatus.UNSUBSCRIBING, BorrowerKind.UNSUBSCRIBE)
    unasked = _pairs("borrower", BorrowerStatus.CONNECTING, BorrowerKind.PING_RESPONSE, BorrowerKind.PROGRESS_SAVED)
    return unborn | dead | twice | leaves_again | unasked


def _assignment() -> set[Pair]:
    """What only another's change of the row, or a peer that breaks the rules, can cause; and what never happens."""
    never = {
        ("assignment", status, kind)
        for status, row in ASSIGNMENTS.items()
        for kind, (_, action) in row.items()
        if action is Action.NEVER
    }
    lost = {("assignment", status, Kind.LOST) for status in (Status.GRANTING, Status.GRANTED, Status.REVOKING)}
    refused = _pairs("assignment", Status.REVOKING, Kind.GRANT_REFUSED)
    denied_after_use = _pairs("assignment", Status.GRANTED, Kind.REVOKE_FINISHED)
    return never | lost | refused | denied_after_use


def _election() -> set[Pair]:
    """Answers and timers that nobody waits for: the machine weighs them before it asks the table."""
    wishes = (election.Kind.WANT, election.Kind.UNWANT)
    unawaited = {
        ("election", status, kind)
        for status, row in election.TABLE.items()
        for kind, (after, action) in row.items()
        if action is election.Action.IGNORE and after is status and kind not in wishes
    }
    # What is not there is not asked whether it is wanted, and a claim under way is given up once.
    unwanted = {
        ("election", status, election.Kind.UNWANT) for status in (election.Status.ABSENT, election.Status.ABANDONING)
    }
    # A lease that ends under its holder, while it trusts it: the group was deleted, or somebody broke the clock rule.
    expired = _pairs("election", election.Status.LED, election.Kind.REFUSED)
    # Wanted again within the milliseconds in which an unwanted claim is under way.
    again = _pairs("election", election.Status.ABANDONING, election.Kind.WANT)
    return unawaited | unwanted | expired | again


EXCEPTIONS: frozenset[Pair] = frozenset(_borrower() | _assignment() | _election())
