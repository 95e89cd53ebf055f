"""Finds strategies by name: the built-in ones, and those of installed packages.

The built-in ones are not registered as entry points: they must be available also where sublet runs from a source tree
whose installed metadata is out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from sublet_leader.allocation.even_strategy import EvenStrategy
from sublet_leader.allocation.load_strategy import LoadStrategy
from sublet_leader.allocation.strategy import AllocationStrategy
from sublet_protocol.domain.errors import InvalidSetting

ENTRY_POINTS = "sublet.allocation"
"""The group of entry points: each names a class, or another callable without arguments, that returns an
`AllocationStrategy`."""

BUILT_IN: Mapping[str, Callable[[], AllocationStrategy]] = MappingProxyType(
    {"even": EvenStrategy, "load": LoadStrategy}
)


def load_strategy(name: str) -> AllocationStrategy:
    """Return the strategy of that name; other packages cannot replace a built-in one.

    Raise `InvalidSetting` if there is none, if two distributions provide one, or if it cannot be loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    installed = entry_points(group=ENTRY_POINTS)
    matches = [entry_point for entry_point in installed if entry_point.name == name]
    if not matches:
        names = ", ".join(sorted({*BUILT_IN, *installed.names}))
        raise InvalidSetting(
            f"strategy {name!r} is not known: there are {names}. Others come with packages that are installed beside "
            f"the leader and have an entry point in the group {ENTRY_POINTS!r}."
        )
    if len(matches) > 1:
        origins = ", ".join(sorted(_describe_origin(entry_point) for entry_point in matches))
        raise InvalidSetting(f"strategy {name!r} is brought by {origins}: uninstall all but one of them.")
    return _load(matches[0])


def _load(entry_point: EntryPoint) -> AllocationStrategy:
    subject = f"strategy {entry_point.name!r} ({entry_point.value}, brought by {_describe_origin(entry_point)})"
    try:
        strategy: AllocationStrategy = entry_point.load()()
    except Exception as error:
        raise InvalidSetting(f"{subject} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(getattr(strategy, "plan", None)):
        raise InvalidSetting(
            f"{subject} makes {strategy!r}, which has no method `plan(allocation_input)` and so is no strategy."
        )
    return strategy


def _describe_origin(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unnamed distribution"
