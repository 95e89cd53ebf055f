"""What must be true of a history, whatever was killed: one promise of docs/guarantees.md each, and nothing of how it is
kept.

`log` (what publishers were answered, what is stored), `deliveries` (what a group was given, and how often), `order`,
`effects` (the rows that transactions left), `lendings` (what history says). `anomaly_report` shows what led to an
anomaly.
"""

from __future__ import annotations

from tests.recorded.checks.anomaly import Anomaly, Kind
from tests.recorded.checks.deliveries import check_deliveries
from tests.recorded.checks.effects import check_effects
from tests.recorded.checks.lendings import check_lendings
from tests.recorded.checks.log import check_log
from tests.recorded.checks.order import check_order
from tests.recorded.history import History

__all__ = ["Anomaly", "Kind", "check"]


def check(history: History) -> list[Anomaly]:
    """All that is wrong with it."""
    found = check_log(history)
    for group in history.groups:
        found += check_deliveries(history, group)
        found += check_order(history, group)
        found += check_lendings(history, group)
        if group.exact:
            found += check_effects(history, group)
    return found
