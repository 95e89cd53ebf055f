"""pyarrow.compute, imported by the first use of a function: that takes as long as a tenth of all that a program imports
for a session."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    import pyarrow.compute

    return globals().setdefault(name, getattr(pyarrow.compute, name))
