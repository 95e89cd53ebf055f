"""The payload locations and S3 endpoints that this process may use.

The database names locations; which of them are used is decided by the process's own settings.
"""

from __future__ import annotations

import os
import re
from typing import Final

from sublet_protocol.domain.address import is_loopback_host
from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.objects.location import PayloadStoreLocation, parse_location

ENDPOINTS: Final = "SUBLET_S3_ENDPOINTS"
LOCATIONS: Final = "SUBLET_PAYLOAD_LOCATIONS"

_ENDPOINT = re.compile(r"(https?)://([a-z0-9.-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.IGNORECASE)


def find_refusal(location: PayloadStoreLocation) -> str | None:
    """Return why this process does not use a payload location; None where it may: it is below one that is allowed, if
    any is named, and its endpoint is on this machine, the provider's own, or allowed. Raise `InvalidSetting`."""
    allowed = _read_allowed_locations()
    if allowed and not any(f"{location.prefix}/".startswith(f"{prefix}/") for prefix in allowed):
        return f"is below none of those that {LOCATIONS} of this process allows: add it if it is yours"
    options = dict(location.options)
    if "endpoint_override" not in options:
        return None
    value = options["endpoint_override"]
    endpoint = (value if "://" in value else f"{options.get('scheme', 'https')}://{value}").lower().rstrip("/")
    matched = _ENDPOINT.fullmatch(endpoint)
    if matched is None or not (is_loopback_host(matched[2]) or endpoint in read_allowed_endpoints()):
        return f"has the endpoint {endpoint}, which {ENDPOINTS} of this process does not allow: add it if it is yours"
    return None


def read_allowed_endpoints() -> frozenset[str]:
    """Return those that this process's setting names, as SCHEME://HOST:PORT. Raise `InvalidSetting`."""
    endpoints = set[str]()
    for text in _read_list(ENDPOINTS):
        if not _ENDPOINT.fullmatch(text.rstrip("/")):
            raise InvalidSetting(
                f"{ENDPOINTS}: {text!r} is no endpoint. Give https://HOST:PORT, several separated by commas."
            )
        endpoints.add(text.lower().rstrip("/"))
    return frozenset(endpoints)


def _read_allowed_locations() -> list[str]:
    """Return the prefixes that this process's setting names; none: any location is allowed. Raise `InvalidSetting`."""
    try:
        allowed = [parse_location(text) for text in _read_list(LOCATIONS)]
    except InvalidSetting as problem:
        raise InvalidSetting(f"{LOCATIONS}: {problem}") from None
    if any(each.options for each in allowed):
        raise InvalidSetting(f"{LOCATIONS}: a payload location has options. Give each without ? and what follows.")
    return [each.prefix for each in allowed]


def _read_list(variable: str) -> list[str]:
    return [each.strip() for each in os.environ.get(variable, "").split(",") if each.strip()]
