"""Where a node is: `HOST:PORT`, or `[::1]:PORT`."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"(\[(?P<ipv6>[^][\s/]+)]|(?P<host>[^][\s/:]+)):(?P<port>[0-9]{1,5})", re.ASCII)


def split_address(text: str) -> tuple[str, int] | None:
    """Host, without brackets, and port; None if it is not that, or the port is above 65535."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        return None
    return found["ipv6"] or found["host"], int(found["port"])
