"""How many bytes an object keeps alive, by walking what it refers to."""

from __future__ import annotations

import gc
import sys
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, Enum)
"""What belongs to the program and not to the object."""


def footprint(root: object) -> int:
    """Bytes of everything that can be reached, each object once; without what the allocator adds to each."""
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
