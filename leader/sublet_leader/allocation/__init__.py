"""Who should hold how many streams, and the few moves that get there.

A **strategy** is asked with a `AllocationInput` and answers with a `Plan`: what to grant and what to take back now. It
is pure and remembers nothing; the leader asks again whenever something has changed, and once in a while anyway. So a
plan need not be complete: what is revoked becomes free when its holder lets go, and is granted by a later plan. Because
rows, members and loads come in and nothing else, every law of the sharing is tested without a leader.

`strategy` has the words and the interface, `even` and `load` are the two built in, `strategies` finds one by its name,
also those that others have installed under the entry point group `sublet.allocation`. `quotas` says how many streams
each member should hold, `member_loads` who has the most room. `docs/allocation.md` is the page for users.
"""

from sublet_leader.allocation.even import EvenStrategy
from sublet_leader.allocation.load import LoadStrategy
from sublet_leader.allocation.quotas import compute_quotas
from sublet_leader.allocation.strategies import ENTRY_POINTS, load_strategy
from sublet_leader.allocation.strategy import (
    AllocationInput,
    AllocationPlan,
    AllocationStrategy,
    StreamLoad,
    validate_plan,
)

__all__ = [
    "ENTRY_POINTS",
    "AllocationInput",
    "AllocationPlan",
    "AllocationStrategy",
    "EvenStrategy",
    "LoadStrategy",
    "StreamLoad",
    "compute_quotas",
    "load_strategy",
    "validate_plan",
]
