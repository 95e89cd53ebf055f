"""Authorization over HTTP: the same principals, tokens and rights as over gRPC.

Where the node does not authenticate callers, all can read everything, and callers with the node's admin token may act.
A token comes in the header `Authorization: Bearer`, which no other site's page can make a browser send. A certificate a
browser sends for pages of other sites too; but an action's body has to be declared as JSON, which a browser sends for
another site only where we allowed it, and we do not. So no site can act in a user's name. The audit log records each
request, its caller and address, and its outcome.
"""

from __future__ import annotations

import hmac
import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from sublet_leader.feed.admission import AdmissionLimiter
from sublet_leader.http import body_fields
from sublet_leader.http.body_fields import JsonBody, read_json_object
from sublet_leader.http.responses import REFUSALS, error_response, refusal_response
from sublet_leader.http.settings import CERTIFICATE
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.secret import Secret
from sublet_protocol.gate import audit
from sublet_protocol.gate.gate import AccessGate, Caller
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count

log = logging.getLogger(__name__)

MAX_ACTIONS = 8
"""At a time, each with connections of its own to the database."""
RETRY_AFTER_MS = 1000
NAMES = ("subscription", "node", "session")
"""The fields that say what an action is about. Logs cut a body at its end, so that these come first."""
MAX_VALUE_CHARACTERS = 60
"""Of each other field's value in logs, so that none keeps the others out."""

Action = Callable[[JsonBody], Response]
"""Executes what the body requests; may block."""
Endpoint = Callable[[Request], Any]
"""Answers a request; a plain function may block."""
Guarded = Callable[[Request], Awaitable[Response]]


def get_caller(request: Request) -> Caller:
    """Return the caller of a request that a guard has admitted."""
    caller: Caller = request.state.caller
    return caller


class RequestGuard:
    """Admits requests to endpoints. `admin_token`: where the gate is off, callers that send it may act."""

    def __init__(self, gate: AccessGate, admin_token: Secret | None) -> None:
        self._gate, self._token = gate, admin_token
        self._actions = AdmissionLimiter("actions", MAX_ACTIONS, 0, RETRY_AFTER_MS)
        self._log_throttle = LogThrottle()

    def require_known(self, answer: Endpoint) -> Guarded:
        """Return the endpoint for all known callers; it checks itself the rights on what it shows."""

        async def call_guarded(request: Request) -> Response:
            await self._identify(request)
            return await _call_endpoint(answer, request)

        return call_guarded

    def require_watch(self, answer: Endpoint) -> Guarded:
        """Return the endpoint for callers that may watch some group."""

        async def call_guarded(request: Request) -> Response:
            caller = await self._identify(request)
            if not caller.may_somewhere(Right.WATCH):
                raise caller.denied_error(Right.WATCH)
            return await _call_endpoint(answer, request)

        return call_guarded

    def require_watch_all(self, answer: Endpoint) -> Guarded:
        """Return the endpoint for callers that may watch all groups."""

        async def call_guarded(request: Request) -> Response:
            (await self._identify(request)).check(Right.WATCH)
            return await _call_endpoint(answer, request)

        return call_guarded

    def require_operate(self, act: Action) -> Guarded:
        """Return the action for callers that may operate its group; all groups, if it has none."""

        async def call_guarded(request: Request) -> Response:
            if not self._gate.is_on and (refused := self._check_admin_token(request)) is not None:
                return refused
            caller = await self._identify(request)
            self._gate.enter(caller)
            body: JsonBody = {}
            status = 500  # unless it is answered
            try:
                response = await self._respond(act, request, caller, body)
                status = response.status_code
            finally:
                _record(caller, body, status)
            return response

        return call_guarded

    async def _respond(self, act: Action, request: Request, caller: Caller, body: JsonBody) -> Response:
        """Read the body into `body`, check the caller's right, and execute the action."""
        try:
            body.update(await read_json_object(request))
            if caller.principal is not None:
                _check_right(caller, body)
            with self._actions.admit(principal=caller.principal):
                return await run_in_threadpool(act, body)
        except REFUSALS as error:
            return refusal_response(request, error)

    async def _identify(self, request: Request) -> Caller:
        sent = request.headers.get("Authorization")
        await self._gate.read_unknown(sent)
        certificate = getattr(request.state, CERTIFICATE, None)
        caller = self._gate.identify(sent, _find_client_address(request), _find_action(request), certificate)
        request.state.caller = caller
        return caller

    def _check_admin_token(self, request: Request) -> Response | None:
        """Return the refusal; None if the request has the token."""
        if self._token is None:
            hint = "start it with --auth required and give operate, or with SUBLET_ADMIN_TOKEN, to allow actions."
            return error_response(403, f"this node is read only: {hint}")
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(sent.strip().encode(), self._token.reveal().encode()):
            return None
        client, action = _find_client_address(request), _find_action(request)
        suppressed_count = self._log_throttle.acquire(client)
        if suppressed_count is not None:
            text = "HTTP action refused: address=%s action=%s: the admin token is missing or wrong%s"
            fields = {"action": action, "address": client, "status": 401}
            log.warning(text, client, action, format_suppressed_count(suppressed_count), extra={"fields": fields})
        return error_response(
            401,
            "the admin token is missing or wrong: send Authorization: Bearer TOKEN.",
            **{"WWW-Authenticate": 'Bearer realm="sublet"'},
        )


async def _call_endpoint(answer: Endpoint, request: Request) -> Response:
    if inspect.iscoroutinefunction(answer):
        response: Response = await answer(request)
        return response
    return await run_in_threadpool(answer, request)


def _check_right(caller: Caller, body: JsonBody) -> None:
    """Raise `PermissionDenied` unless the caller may operate what the body names."""
    if "subscription" in body:
        subscription = body_fields.read_subscription(body)
        caller.check(Right.OPERATE, subscription.filter, subscription.group)
    else:
        caller.check(Right.OPERATE)


def _record(caller: Caller, body: JsonBody, status: int) -> None:
    outcome = "done" if status == 200 else "refused" if status < 500 else "failed"
    shown = _arrange_for_log(body)
    if status != 403:  # that is in the audit log, with those like it
        object = json.dumps(shown, ensure_ascii=False)  # a name is the shorter so, and the line escapes it
        audit.record(caller.principal, caller.address, caller.action, object, f"{outcome} ({status})")
    fields = {"action": caller.action, "address": caller.address, "status": status}
    if "subscription" in body:
        fields["subscription"] = body["subscription"]
    text = "HTTP action handled: principal=%s address=%s action=%s outcome=%s status=%d: %.300s"
    principal = caller.principal or "admin_token"
    log.info(text, principal, caller.address, caller.action, outcome, status, shown, extra={"fields": fields})


def _arrange_for_log(body: JsonBody) -> JsonBody:
    """Return the body as logs have it: names first, in whatever order the caller wrote it."""
    names = {name: body[name] for name in NAMES if name in body}
    return names | {name: _cut(value) for name, value in body.items() if name not in names}


def _cut(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    return value if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."


def _find_action(request: Request) -> str:
    return str(request.scope["path"]).removeprefix("/api/v1/")


def _find_client_address(request: Request) -> str:
    """Return the address of the client, which is a proxy's if one is in front of the port."""
    return "" if request.client is None else request.client.host
