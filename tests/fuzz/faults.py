"""A target that has the faults which the fuzzer is to find, for its own test."""

from __future__ import annotations

import os
import signal


def execute(seed: int, number: int) -> bool:
    """Die at 3, need too much memory at 5, refuse 7."""
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 5:
        bytearray(1 << 30)
    return number != 7
