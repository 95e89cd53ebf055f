"""The door: what users import, and the command line.

    from sublet import Publisher, Session, connect

Names are loaded when they are first used, so that `import sublet` costs next to nothing and a consumer's process never
loads the leader's or the command line's libraries. `sublet.errors` holds everything that can go wrong by name,
`sublet.spark` what runs inside Spark, `sublet.traces` OpenTelemetry.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sublet._version import __version__

if TYPE_CHECKING:
    from borrower.async_session import AsyncSession
    from borrower.batch import Batch
    from borrower.feed import Feed
    from borrower.session import Session
    from protocol import errors
    from protocol.epochs import GroupFrontier
    from storage.publish import AsyncPublisher, Delivery, Position, Publisher
    from sublet.database import Database, connect

__all__ = [
    "AsyncPublisher",
    "AsyncSession",
    "Batch",
    "Database",
    "Delivery",
    "Feed",
    "GroupFrontier",
    "Position",
    "Publisher",
    "Session",
    "__version__",
    "connect",
    "errors",
]

_HOMES = {
    "AsyncPublisher": "storage.publish",
    "AsyncSession": "borrower.async_session",
    "Batch": "borrower.batch",
    "Database": "sublet.database",
    "Delivery": "storage.publish",
    "Feed": "borrower.feed",
    "GroupFrontier": "protocol.epochs",
    "Position": "storage.publish",
    "Publisher": "storage.publish",
    "Session": "borrower.session",
    "connect": "sublet.database",
}
_MODULES = {"errors": "protocol.errors", "spark": "sublet.spark", "traces": "sublet.traces"}


def __getattr__(name: str) -> Any:
    """Load a public name from where it lives, once."""
    if name in _HOMES:
        found: Any = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        found = import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'sublet' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
