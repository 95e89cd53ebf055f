"""An answer, and the headers that every answer has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_STORE = {"Cache-Control": "no-store"}


@dataclass(frozen=True, slots=True)
class Response:
    """Status, body and what the body is."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=lambda: NO_STORE)


def as_json(told: Any, status: int = 200) -> Response:
    """An object, for programs."""
    return Response(status, json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode())


def refusal(status: int, error: str, **headers: str) -> Response:
    """What was wrong, and what helps: `error` says both."""
    return Response(status, json.dumps({"error": error}).encode(), headers={**NO_STORE, **headers})
