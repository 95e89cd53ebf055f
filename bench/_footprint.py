"""Bytes that an object keeps alive, found by following its references."""

from __future__ import annotations

import gc
import sys
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, Enum)
"""Types of objects that belong to the program and are not counted."""


def footprint(root: object) -> int:
    """Return the bytes of all reachable objects, each counted once, without the allocator's overhead."""
    seen: set[int] = set()
    total, waiting = 0, [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, MethodType):
            waiting.append(one.__self__)
        else:
            waiting.extend(gc.get_referents(one))
    return total
