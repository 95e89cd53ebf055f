"""Notification drivers by name, as installed: the entry points of the group `sublet.notify`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from sublet_protocol.domain.errors import InvalidSetting, SubletError
from sublet_storage.notify.drivers.base import NotificationDriver, NotificationDriverFactory

GROUP = "sublet.notify"
OURS = "sublet"

_BUILT_IN = {"poll": "no_push:NoPushDriver", "postgres": "postgres:PostgresNotificationDriver", "zmq": "zmq:ZmqDriver"}
"""Ours, which are never replaced, and are there also where nothing is installed: the source on a path, code shipped to
executors."""


def list_drivers() -> list[str]:
    """Return the names that `load_driver` accepts, sorted; a library that one of them needs may be missing still."""
    return sorted({*_BUILT_IN, *(each.name for each in entry_points(group=GROUP))})


def load_driver(name: str) -> NotificationDriverFactory:
    """Return the factory of the driver of that name.

    Raise `InvalidSetting` if no installed distribution brings it, if several do, or if it cannot be loaded.
    """
    entry = _find_entry(name)
    try:
        factory: NotificationDriverFactory = entry.load()
    except Exception as error:
        raise InvalidSetting(
            f"notification driver {name!r} is installed but cannot be loaded ({error}). {_format_hint(entry)}."
        ) from error
    return factory


def create_driver(name: str, url: str, **options: str) -> NotificationDriver:
    """Return the driver of that name. Raise `InvalidSetting`, or the errors of ours that the driver raises."""
    try:
        return load_driver(name)(url, **options)
    except SubletError:
        raise
    except Exception as error:
        raise InvalidSetting(
            f"notification driver {name!r} cannot be used here ({error}). "
            f"{_format_hint(_find_entry(name))}, or use another one."
        ) from error


def driver_name(endpoint: str) -> str:
    """Return the name of the driver that reaches an endpoint."""
    return endpoint.partition(":")[0]


def _find_entry(name: str) -> EntryPoint:
    if name in _BUILT_IN:  # a look at what is installed takes 20 ms: it reads a file of each distribution
        return EntryPoint(name, f"sublet_storage.notify.drivers.{_BUILT_IN[name]}", GROUP)
    entries = {_get_distribution(each): each for each in entry_points(group=GROUP, name=name)}
    if not entries:
        raise InvalidSetting(
            f"notification driver {name!r}: no installed package brings one of that name. Installed are "
            f"{', '.join(list_drivers()) or 'none'}: choose one of these, or install the package that has it."
        )
    if len(entries) > 1:
        raise InvalidSetting(
            f"notification driver {name!r} is brought by several packages ({', '.join(sorted(entries))}), and it has "
            "to be clear which one is meant. Uninstall all but one."
        )
    return next(iter(entries.values()))


def _get_distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else OURS


def _format_hint(entry: EntryPoint) -> str:
    package = _get_distribution(entry)
    if package == OURS:
        return f"Run `pip install '{OURS}[{entry.name}]'`"
    return f"Install what the package {package} needs, or another version of it"
