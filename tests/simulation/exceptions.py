"""The (status, event) pairs that no simulated run brings about, each with its reason.

Everything else in the machines' tables occurs within a thousand seeds, or `test_seeds` fails. Each pair listed here has
a unit test instead, as has every pair of every table: `test_group_leader_table.py` (a scenario for each) and
`test_election.py` (the target of each pair), both in `tests/unit`.
"""

from __future__ import annotations

from sublet_leader import election
from tests.simulation.tally import Pair

REASONS: dict[Pair, str] = {
    ("election", election.ElectionStatus.ABANDONING, election.ElectionEventKind.CAMPAIGN): (
        "a node that gives up a claim under way forgets its group, and opens it again only behind that claim's answer; "
        "the runs of `tests/property/test_election_safety.py`, which want and unwant at will, have it"
    ),
}

EXCEPTIONS: frozenset[Pair] = frozenset(REASONS)
