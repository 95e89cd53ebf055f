"""Check of the timeouts that users give."""

from __future__ import annotations

import math
import threading
from numbers import Real
from typing import Any

from sublet_protocol.domain.errors import InvalidSetting


def check_timeout(timeout_s: Any) -> float | None:
    """Return a timeout in seconds, which may be over already, or None: as long as it takes, also where it is longer
    than a thread can wait. Raise `InvalidSetting`.
    """
    if timeout_s is None:
        return None
    is_number, longest_s = isinstance(timeout_s, Real), threading.TIMEOUT_MAX
    if is_number and not math.isnan(seconds := float(min(timeout_s, longest_s))):
        return None if timeout_s > longest_s else seconds
    raise InvalidSetting(
        f"timeout_s {ascii(timeout_s)[:60]}: it is a number of seconds. Leave it out to wait as long as it takes."
    )
