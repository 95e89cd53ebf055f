"""Who may change something over HTTP: whoever sends the node's admin token, and nobody where the node has none.

The token comes in the header `Authorization: Bearer`, which no other site's page can make a browser send: so nothing is
done in somebody's name behind his back. The log has what was asked for, by which address, and what came of it.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from sublet_leader.http.body_fields import JsonBody, read_json_object
from sublet_leader.http.responses import REFUSALS, error_response, refusal
from sublet_protocol.domain.secret import Secret
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count

log = logging.getLogger(__name__)

Action = Callable[[JsonBody], Response]
"""Does what the body says; may block."""


class AdminTokenGuard:
    """Guards actions."""

    def __init__(self, token: Secret | None) -> None:
        self._token = token
        self._quiet = LogThrottle()

    def require_token(self, act: Action) -> Callable[[Request], Awaitable[Response]]:
        """The action, for whoever has the token."""

        async def guarded(request: Request) -> Response:
            if self._token is None:
                return error_response(403, "this node is read only: start it with SUBLET_ADMIN_TOKEN to allow actions.")
            scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                sent.strip().encode(), self._token.reveal().encode()
            ):
                return self._unknown(request)
            body: JsonBody = {}
            status = 500  # unless it is answered
            try:
                response = await _respond(act, request, body)
                status = response.status_code
            finally:
                _record(request, body, status)
            return response

        return guarded

    def _unknown(self, request: Request) -> Response:
        client, action = _client(request), _action(request)
        before = self._quiet.acquire(client)
        if before is not None:
            text = "refused %s from %s: the admin token is missing or wrong%s"
            fields = {"action": action, "client": client, "status": 401}
            log.warning(text, action, client, format_suppressed_count(before), extra={"fields": fields})
        return error_response(
            401,
            "the admin token is missing or wrong: send Authorization: Bearer TOKEN.",
            **{"WWW-Authenticate": 'Bearer realm="sublet"'},
        )


async def _respond(act: Action, request: Request, body: JsonBody) -> Response:
    """Fill `body`, and do what it says."""
    try:
        body.update(await read_json_object(request))
        return await run_in_threadpool(act, body)
    except REFUSALS as error:
        return refusal(request, error)


def _record(request: Request, reported: JsonBody, status: int) -> None:
    fields = {"action": _action(request), "client": _client(request), "status": status}
    if "subscription" in reported:
        fields["subscription"] = reported["subscription"]
    text = "by the admin token from %s: %s %.300s: %s (%d)"
    outcome = "done" if status == 200 else "refused" if status < 500 else "failed"
    log.info(text, _client(request), _action(request), reported, outcome, status, extra={"fields": fields})


def _action(request: Request) -> str:
    return str(request.scope["path"]).removeprefix("/api/v1/")


def _client(request: Request) -> str:
    """The address it came from, which is a proxy's where one stands before the port."""
    return "" if request.client is None else request.client.host
