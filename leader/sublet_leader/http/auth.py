"""Who may change something over HTTP: whoever sends the node's admin token, and nobody where the node has none.

The token comes in the header `Authorization: Bearer`, which no other site's page can make a browser send: so nothing is
done in somebody's name behind his back. The log has what was asked for, by which address, and what came of it.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any

from sublet_leader.http.responses import Request, Response, Route, error_response, respond
from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count

log = logging.getLogger(__name__)

MIN_TOKEN = 16

Action = Callable[[dict[str, Any]], Response]
"""Does what the body says."""


def validate_token(token: str | None) -> str | None:
    """The token, if there is one. Raises `InvalidSetting`, which does not show it."""
    if token is None or token == "":
        return None
    if len(token) < MIN_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidSetting(
            f"SUBLET_ADMIN_TOKEN has {len(token)} characters, or some that cannot be sent: give at least "
            f"{MIN_TOKEN} of ASCII without blanks, such as those of `openssl rand -hex 16`."
        )
    return token


class AdminGuard:
    """Guards actions."""

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._quiet = LogThrottle()

    def require_token(self, act: Action) -> Route:
        """The action, for whoever has the token."""

        def guarded(request: Request) -> Response:
            if self._token is None:
                return error_response(403, "this node is read only: start it with SUBLET_ADMIN_TOKEN to allow actions.")
            if request.bearer is None or not hmac.compare_digest(request.bearer.encode(), self._token.encode()):
                return self._unknown(request)
            reported: dict[str, Any] = {}

            def done(request: Request) -> Response:
                reported.update(request.json_object())
                return act(reported)

            status = 500  # unless it is answered
            try:
                response = respond(done, request)
                status = response.status
            finally:
                _record(request, reported, status)
            return response

        return guarded

    def _unknown(self, request: Request) -> Response:
        before = self._quiet.acquire(request.client)
        if before is not None:
            text = "refused %s from %s: the admin token is missing or wrong%s"
            fields = {"action": _action(request), "client": request.client, "status": 401}
            log.warning(
                text, _action(request), request.client, format_suppressed_count(before), extra={"fields": fields}
            )
        return error_response(
            401,
            "the admin token is missing or wrong: send Authorization: Bearer TOKEN.",
            **{"WWW-Authenticate": 'Bearer realm="sublet"'},
        )


def _record(request: Request, reported: dict[str, Any], status: int) -> None:
    fields = {"action": _action(request), "client": request.client, "status": status}
    if "subscription" in reported:
        fields["subscription"] = reported["subscription"]
    text = "by the admin token from %s: %s %.300s: %s (%d)"
    outcome = "done" if status == 200 else "refused" if status < 500 else "failed"
    log.info(text, request.client, _action(request), reported, outcome, status, extra={"fields": fields})


def _action(request: Request) -> str:
    return request.path.removeprefix("/api/v1/")
