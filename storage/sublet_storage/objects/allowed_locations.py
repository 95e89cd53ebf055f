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

_IN_CLEAR: Final = (
    f"has scheme=http without an endpoint, so that payloads would go to the provider in clear, which is not allowed "
    f"where {LOCATIONS} is set: leave it away, or give an endpoint that {ENDPOINTS} names with http://"
)
_ENDPOINT = re.compile(r"(https?)://([a-z0-9.-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.IGNORECASE)


def find_refusal(location: PayloadStoreLocation) -> str | None:
    """Return why this process does not use a payload location; None where it may: its endpoint is the provider's own,
    or allowed, and it is below a location that is allowed. Where none is named any location is, and any endpoint on
    this machine. Raise `InvalidSetting`."""
    allowed = _read_allowed_locations()
    if allowed and not any(f"{location.prefix}/".startswith(f"{prefix}/") for prefix in allowed):
        return f"is below none of those that {LOCATIONS} of this process allows: add it if it is yours"
    options = dict(location.options)
    scheme = options.get("scheme", "https")
    if "endpoint_override" not in options:
        return _IN_CLEAR if allowed and scheme != "https" else None
    value = options["endpoint_override"]
    endpoint = (value if "://" in value else f"{scheme}://{value}").lower().rstrip("/")
    matched = _ENDPOINT.fullmatch(endpoint)
    if matched is None:
        return f"has the endpoint {endpoint}, which is none: an endpoint is HOST:PORT, or https://HOST:PORT"
    if endpoint in read_allowed_endpoints() or (not allowed and is_loopback_host(matched[2])):
        return None
    # Another of this machine could listen there, as a store with a bucket of the same name. Where any location is
    # allowed, nothing is gained by that.
    scope = f" (also on this machine, where {LOCATIONS} is set)" if allowed else ""
    return (
        f"has the endpoint {endpoint}, which {ENDPOINTS} of this process does not allow{scope}: add it if it is yours"
    )


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
