"""Bounds of the HTTP port."""

from __future__ import annotations

from dataclasses import dataclass, field

from sublet_leader.listen_address import ListenAddress
from sublet_leader.observe.settings import MetricsSettings

MAX_CONNECTIONS = 256
"""At a time; whoever comes then is turned away."""
HEAD_S = 3.0
"""For a request's line and headers: connections that say nothing are soon out of the others' way."""
REQUEST_TIMEOUT_S = 10.0
"""For a request's body, and for taking the answer."""
MAX_HEAD = 65_536
MAX_BODY = 65_536
MAX_FIELDS = 20
GRACE_S = 1
"""For what is being answered when it is closed."""


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """A port: where it listens, its bounds, and what it takes to act there (None: nobody may)."""

    listen: ListenAddress
    settings: MetricsSettings = field(default_factory=MetricsSettings)
    admin_token: str | None = field(default=None, repr=False)
