"""Counts by client address; for IPv6 by the network of one customer."""

from __future__ import annotations

import ipaddress
from collections import Counter


class ClientAddressCounts:
    """Counts of connections or open calls by client address; an address with none is dropped."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, host: str) -> None:
        """Add one for the address."""
        self._counts[to_source(host)] += 1

    def remove(self, host: str) -> None:
        """Remove one for the address."""
        source = to_source(host)
        self._counts[source] -= 1
        if not self._counts[source]:
            del self._counts[source]

    def count_from(self, host: str) -> int:
        """Return how many there are from there."""
        return self._counts[to_source(host)]

    def total(self) -> int:
        """Return how many there are in all."""
        return self._counts.total()


def to_source(host: str) -> str:
    """Return the address, or of IPv6 its network of 64 bits, which is what one machine may have; what is no address, as
    it is."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped is not None:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False))
