"""Which function answers which path, and what is said where none does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psycopg

from leader.http.request import Request
from leader.http.response import Response, refusal
from protocol.errors import Conflict, NotFound, SubletError, UsageError

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
            return refusal(404, f"there is nothing at {request.path[:200]}: docs/http.md lists what there is.")
        route = methods.get(request.method)
        if route is None:
            allowed = ", ".join(methods)
            return refusal(405, f"{request.method} is not for {request.path}: use {allowed}.", Allow=allowed)
        return answered(route, request)


def answered(route: Route, request: Request) -> Response:
    """What a function answers, or raises on purpose, which is a refusal."""
    try:
        return route(request)
    except SubletError as error:
        return refusal(_status(error), str(error))
    except psycopg.OperationalError as error:
        return refusal(503, f"the database did not answer as it should: {' '.join(str(error).split())}.")


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
