"""Requests, responses with the headers that every one has, and which function answers which path."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg

from sublet_protocol.domain.errors import Conflict, NotFound, SubletError, UsageError


@dataclass(frozen=True, slots=True)
class Request:
    """`query` has the last value of each name. `bearer`: the token that was sent; None: none was. `client`: the address
    it came from, which is a proxy's where one stands before the port."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""
    bearer: str | None = None
    content_type: str = ""
    body: bytes = b""
    client: str = ""

    def text_value(self, name: str, default: str | None = None) -> str:
        """A value of the query. Raises `UsageError` where it must be given."""
        found = self.query.get(name, default)
        if found is None:
            raise UsageError(f"{self.path} needs {name}: add ?{name}=...")
        if "\0" in found:
            raise UsageError(f"{name} is {found[:40]!r}: the database takes no zero character. Leave it out.")
        return found

    def int_value(self, name: str, default: int, most: int) -> int:
        """A number of the query, from 0 to `most`. Raises `UsageError`."""
        reported = self.query.get(name)
        if reported is None:
            return default
        number = int(reported) if reported.isascii() and reported.isdecimal() and len(reported) < 20 else -1
        if not 0 <= number <= most:
            raise UsageError(f"{name} is {reported[:40]!r}: it must be a whole number from 0 to {most}.")
        return number

    def choice_value(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        """One of several words of the query. Raises `UsageError`."""
        reported = self.query.get(name, default)
        if reported not in choices:
            raise UsageError(f"{name} is {reported[:40]!r}: it must be one of {', '.join(choices)}.")
        return reported

    def json_object(self) -> dict[str, Any]:
        """The body, an object of JSON. Raises `UsageError`."""
        if self.content_type.partition(";")[0].strip().lower() != "application/json":
            raise UsageError("the body must be JSON: send it with Content-Type: application/json.")
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the body is no JSON: {error}.") from None
        if not isinstance(found, dict):
            raise UsageError("the body must be an object of JSON, such as {}.")
        return found


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


def json_response(reported: Any, status: int = 200) -> Response:
    """An object, for programs."""
    return Response(status, json.dumps(reported, ensure_ascii=False, separators=(",", ":")).encode())


def error_response(status: int, error: str, **headers: str) -> Response:
    """What was wrong, and what helps: `error` says both."""
    return Response(status, json.dumps({"error": error}).encode(), headers={**NO_STORE, **headers})


Route = Callable[[Request], Response]
READ = ("GET", "HEAD")


class Routes:
    """{path: {method: function}}; HEAD is GET without its body. Paths that end in `/*` have a last part of any name."""

    def __init__(self, gets: Mapping[str, Route], posts: Mapping[str, Route] | None = None) -> None:
        self._table: dict[str, dict[str, Route]] = {path: dict.fromkeys(READ, route) for path, route in gets.items()}
        for path, route in (posts or {}).items():
            self._table.setdefault(path, {})["POST"] = route

    def __call__(self, request: Request) -> Response:
        """The answer; what a function raises on purpose is one, too."""
        methods = self._table.get(request.path) or self._table.get(f"{request.path.rpartition('/')[0]}/*")
        if methods is None:
            return error_response(404, f"there is nothing at {request.path[:200]}: docs/http.md lists what there is.")
        route = methods.get(request.method)
        if route is None:
            allowed = ", ".join(methods)
            return error_response(405, f"{request.method} is not for {request.path}: use {allowed}.", Allow=allowed)
        return respond(route, request)


def respond(route: Route, request: Request) -> Response:
    """What a function answers, or raises on purpose, which is a refusal."""
    try:
        return route(request)
    except SubletError as error:
        return error_response(_status(error), str(error))
    except psycopg.OperationalError as error:
        return error_response(503, f"the database did not answer as it should: {' '.join(str(error).split())}.")


def _status(error: SubletError) -> int:
    match error:
        case UsageError():
            return 400
        case NotFound():
            return 404
        case Conflict():
            return 409
        case _:
            return 503
