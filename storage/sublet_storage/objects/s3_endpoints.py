"""The S3 endpoints that this process may send payloads to, whatever the database names."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Final

from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.objects.location import PayloadStoreLocation

VARIABLE: Final = "SUBLET_S3_ENDPOINTS"

_ENDPOINT = re.compile(r"(https?)://([a-z0-9.-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.IGNORECASE)


def find_refusal(location: PayloadStoreLocation) -> str | None:
    """Return why this process does not use the endpoint of a location; None if it may: one on this machine, the
    provider's own, or one that is allowed. Raise `InvalidSetting`."""
    options = dict(location.options)
    if "endpoint_override" not in options:
        return None
    value = options["endpoint_override"]
    endpoint = (value if "://" in value else f"{options.get('scheme', 'https')}://{value}").lower().rstrip("/")
    matched = _ENDPOINT.fullmatch(endpoint)
    if matched is None or not (_is_loopback(matched[2]) or endpoint in allowed_endpoints()):
        return f"has the endpoint {endpoint}, which {VARIABLE} of this process does not allow: add it if it is yours"
    return None


def allowed_endpoints() -> frozenset[str]:
    """Return those that this process's setting names, as SCHEME://HOST:PORT. Raise `InvalidSetting`."""
    found = set[str]()
    for text in filter(None, (each.strip() for each in os.environ.get(VARIABLE, "").split(","))):
        if not _ENDPOINT.fullmatch(text.rstrip("/")):
            raise InvalidSetting(
                f"{VARIABLE}: {text!r} is no endpoint. Give https://HOST:PORT, several separated by commas."
            )
        found.add(text.lower().rstrip("/"))
    return frozenset(found)


def _is_loopback(host: str) -> bool:
    """Return whether the host is a loopback address, without a DNS query, whose answer may not be trusted."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
