"""The outlets of one process, one for each driver by which somebody can be reached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from storage.groups.quiet import Quiet
from storage.notify import drivers
from storage.notify.driver import Driver, Factory, Outlet

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Voice:
    """The outlet of one driver, to these endpoints."""

    outlet: Outlet
    endpoints: tuple[str, ...]
    payload_limit: int | None


class Voices:
    """Not thread-safe. A driver that this process cannot have, or that fails, is logged and harms no other."""

    def __init__(self, url: str, load: Callable[[str], Factory]) -> None:
        self._url, self._load = url, load
        self._voices: dict[str, _Voice] = {}
        self._drivers: dict[str, Driver | None] = {}
        self._quiet = Quiet()

    def __bool__(self) -> bool:
        """Whether anybody can be reached."""
        return bool(self._voices)

    @property
    def payload_limit(self) -> int | None:
        """The longest message that all of them take, in bytes; None: any."""
        limits = (voice.payload_limit for voice in self._voices.values())
        return min((limit for limit in limits if limit is not None), default=None)

    def reach(self, endpoints: Iterable[str]) -> bool:
        """Have outlets to these endpoints, and no others; True if one was opened."""
        wanted: dict[str, list[str]] = {}
        for endpoint in endpoints:
            wanted.setdefault(drivers.name_of(endpoint), []).append(endpoint)
        opened = [self._open(name, tuple(sorted(places))) for name, places in wanted.items()]
        for name in self._voices.keys() - wanted.keys():
            self._close(name, self._voices.pop(name).outlet)
        return any(opened)

    def send(self, message: bytes) -> int:
        """Send by all of them; how many took it."""
        return sum(self._send(name, voice.outlet, message) for name, voice in self._voices.items())

    def close(self) -> None:
        """Close all outlets; others may be opened later."""
        self.reach(())

    def _send(self, name: str, outlet: Outlet, message: bytes) -> bool:
        try:
            outlet.send(message)
        except Exception as error:  # noqa: BLE001 - a driver that breaks the rules must not silence the others
            self._complain(name, f"{name} failed to send a notification: %s", error)
            return False
        return True

    def _open(self, name: str, endpoints: tuple[str, ...]) -> bool:
        before, driver = self._voices.get(name), self._driver(name)
        if driver is None or (before and before.endpoints == endpoints):
            return False
        try:
            if not driver.capabilities.pushes:
                return False
            limit = driver.capabilities.payload_limit
            self._voices[name] = _Voice(driver.outlet(endpoints), endpoints, None if limit is None else int(limit))
        except Exception as error:  # noqa: BLE001 - whatever its trouble is, the others go on
            self._complain(name, f"nobody is told of changes by {name}: %s", error)
            return False
        if before:
            self._close(name, before.outlet)
        return True

    def _close(self, name: str, outlet: Outlet) -> None:
        try:
            outlet.close()
        except Exception as error:  # noqa: BLE001 - likewise
            self._complain(name, f"{name} failed to close: %s", error)

    def _driver(self, name: str) -> Driver | None:
        """None if this process cannot have it: it is not tried again."""
        if name not in self._drivers:
            try:
                self._drivers[name] = self._load(name)(self._url)
            except Exception as error:  # noqa: BLE001 - it may be somebody else's, and do anything
                self._complain(name, "some nodes cannot be told of changes: %s", error)
                self._drivers[name] = None
        return self._drivers[name]

    def _complain(self, subject: str, text: str, error: Exception) -> None:
        if self._quiet.ask(subject) is not None:
            log.warning(text, error)
