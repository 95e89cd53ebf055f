"""Allocation strategies: which member should hold which streams.

A **strategy** takes an `AllocationInput` and returns an `AllocationPlan`: what to grant and what to revoke now. It is
pure and stateless; the leader calls it whenever something has changed, and periodically. So a plan need not be
complete: a revoked stream becomes free when its holder has released it, and is granted by a later plan. Because a
strategy depends on rows, members and loads alone, its properties are tested without a leader.

`strategy` has the interface; `even_strategy` and `load_strategy` are built in; `strategy_registry` finds a strategy by
name, also those that other packages have installed under the entry point group `sublet.allocation`. `quotas` computes
how many streams each member should hold, `least_loaded_member` which member has the most room. `docs/allocation.md` is
the page for users.
"""

from sublet_leader.allocation.even_strategy import EvenStrategy
from sublet_leader.allocation.load_strategy import LoadStrategy
from sublet_leader.allocation.quotas import compute_quotas
from sublet_leader.allocation.strategy import (
    AllocationInput,
    AllocationPlan,
    AllocationStrategy,
    StreamLoad,
    validate_plan,
)
from sublet_leader.allocation.strategy_registry import ENTRY_POINTS, load_strategy

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
