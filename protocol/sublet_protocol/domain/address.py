"""A node's address: `HOST:PORT` or `[::1]:PORT`, after `tls://` where it uses TLS."""

from __future__ import annotations

import ipaddress
import re

TLS_SCHEME = "tls://"

_ADDRESS = re.compile(r"(\[(?P<ipv6>[^][\s/]+)]|(?P<host>[^][\s/:]+)):(?P<port>[0-9]{1,5})", re.ASCII)


def split_address(text: str) -> tuple[str, int] | None:
    """Return host, without brackets, and port; None if the text is no address, or the port is above 65535."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        return None
    return match["ipv6"] or match["host"], int(match["port"])


def is_tls(address: str) -> bool:
    """Return whether a node's address is one with TLS."""
    return address.startswith(TLS_SCHEME)


def is_loopback_host(host: str) -> bool:
    """Return whether the host is loopback, without resolving its name: the answer may not be trusted."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def split_node_address(address: str) -> tuple[str, int] | None:
    """Return host and port of a node's address, with or without `tls://`; None if it is no address."""
    return split_address(address.removeprefix(TLS_SCHEME))
