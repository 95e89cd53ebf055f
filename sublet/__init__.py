"""The public API, `from sublet import ...`, and the command line.

    from sublet import Publisher, Session, connect

Names are loaded when they are first used, so that `import sublet` costs next to nothing and a consumer's process never
loads the leader's or the command line's libraries. `sublet.errors` has every public error,
`sublet.spark` what runs inside Spark, `sublet.traces` OpenTelemetry.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sublet._version import __version__

if TYPE_CHECKING:
    from sublet import errors
    from sublet.database import Database, connect
    from sublet_borrower.consumer.async_session import AsyncSession
    from sublet_borrower.consumer.session import Session
    from sublet_borrower.node_client.feed_client import Feed
    from sublet_borrower.streams.batch import Batch
    from sublet_protocol.domain.epoch_frontiers import GroupFrontier
    from sublet_storage.producer import AsyncPublisher, Delivery, Position, Publisher

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
    "AsyncPublisher": "sublet_storage.producer",
    "AsyncSession": "sublet_borrower.consumer.async_session",
    "Batch": "sublet_borrower.streams.batch",
    "Database": "sublet.database",
    "Delivery": "sublet_storage.producer",
    "Feed": "sublet_borrower.node_client.feed_client",
    "GroupFrontier": "sublet_protocol.domain.epoch_frontiers",
    "Position": "sublet_storage.producer",
    "Publisher": "sublet_storage.producer",
    "Session": "sublet_borrower.consumer.session",
    "connect": "sublet.database",
}
_MODULES = ("errors", "spark", "traces")


def __getattr__(name: str) -> Any:
    """Return a public name, imported from its module on first use."""
    if name in _HOMES:
        value: Any = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"sublet.{name}")
    else:
        raise AttributeError(f"module 'sublet' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
