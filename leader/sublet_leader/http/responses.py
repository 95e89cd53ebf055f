"""JSON responses, and errors: one line with the problem and the hint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from sublet_protocol.domain.errors import (
    Conflict,
    NotFound,
    PermissionDenied,
    SubletError,
    Unauthenticated,
    UsageError,
    format_error,
)

STRICT_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}
REFUSALS = (SubletError, psycopg.OperationalError, HTTPException, ClientDisconnect)
"""Exceptions raised on purpose: `refusal_response` makes the response."""


def json_response(content: Any, status: int = 200) -> Response:
    """Return a JSON response."""
    return JSONResponse(content, status)


def error_response(status: int, error: str, **headers: str) -> Response:
    """Return an error response; `error` has the problem and the hint."""
    return Response(json.dumps({"error": error}), status, headers, "application/json")


def refusal_response(request: Request, error: Exception) -> Response:
    """Return the response to one of `REFUSALS`."""
    path = request.scope["path"][:200]
    match error:
        case HTTPException(status_code=404):
            return error_response(404, f"there is nothing at {path}: docs/http.md lists what there is.")
        case HTTPException(status_code=405, headers={"Allow": methods}):
            allowed = ", ".join(sorted(methods.split(", ")))
            return error_response(405, f"{request.method} is not for {path}: use {allowed}.", Allow=allowed)
        case HTTPException():
            return error_response(error.status_code, error.detail)
        case Unauthenticated():
            return error_response(401, str(error), **{"WWW-Authenticate": 'Bearer realm="sublet"'})
        case SubletError():
            return error_response(_choose_status(error), str(error))
        case ClientDisconnect():
            return error_response(400, "the body ends too soon.")
        case _:
            return error_response(503, f"the database did not answer as it should: {format_error(error)}.")


def make_strict(headers: MutableHeaders) -> None:
    """Add the headers that every response has."""
    headers.update(STRICT_HEADERS)
    headers.setdefault("Cache-Control", "no-store")


def _choose_status(error: SubletError) -> int:
    match error:
        case UsageError():
            return 400
        case PermissionDenied():
            return 403
        case NotFound():
            return 404
        case Conflict():
            return 409
        case _:
            return 503


def build_app(routes: Sequence[BaseRoute]) -> Starlette:
    """Return the app with these routes. An unexpected exception is answered with 500 and raised."""

    async def refuse(request: Request, error: Exception) -> Response:
        return refusal_response(request, error)

    async def fail(request: Request, error: Exception) -> Response:
        return error_response(500, "this should not happen; the node's log says where it did. Please report it.")

    app = Starlette(routes=routes, exception_handlers={**dict.fromkeys(REFUSALS, refuse), Exception: fail})
    app.router.redirect_slashes = False
    return app
