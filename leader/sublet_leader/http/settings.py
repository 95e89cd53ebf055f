"""Bounds of the HTTP port."""

from __future__ import annotations

from dataclasses import dataclass, field

from sublet_leader.listen_address import ListenAddress
from sublet_leader.observe.settings import HttpSettings


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """A port: where it listens, its bounds, and what it takes to act there (None: nobody may)."""

    listen: ListenAddress
    settings: HttpSettings = field(default_factory=HttpSettings)
    admin_token: str | None = field(default=None, repr=False)
