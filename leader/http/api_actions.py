"""What may be done over HTTP: pause, resume, step down; only where the node has an admin token, by whoever sends it.

The token comes in the header `Authorization: Bearer`, which no other site's page can make a browser send: so nothing is
done in somebody's name behind his back.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import Any

from leader.http.request import Request
from leader.http.response import Response, as_json, refusal
from protocol.errors import Conflict, InvalidSetting, UsageError
from protocol.words import Subscription
from storage.connect import connect
from storage.groups.instructions import instruct
from storage.groups.orders import Order, Pause, Resume
from storage.groups.overview import describe
from storage.node_orders import LedGroup, step_down
from storage.nodes import live_nodes

log = logging.getLogger(__name__)

LEAST_TOKEN = 16


def checked_token(token: str | None) -> str | None:
    """The token, if there is one. Raises `InvalidSetting`, which does not show it."""
    if token is None or token == "":
        return None
    if len(token) < LEAST_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise InvalidSetting(
            f"SUBLET_ADMIN_TOKEN has {len(token)} characters, or some that cannot be sent: give at least "
            f"{LEAST_TOKEN} of ASCII without blanks, such as those of `openssl rand -hex 16`."
        )
    return token


class ActionsApi:
    """The functions behind the paths."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url, self._token = url, token

    def pause(self, request: Request) -> Response:
        """Takes {"subscription", "reason"}."""
        return self._allowed(request, lambda told: self._instruct(told, Pause(_text(told, "reason", ""))))

    def resume(self, request: Request) -> Response:
        """Takes {"subscription"}."""
        return self._allowed(request, lambda told: self._instruct(told, Resume()))

    def step_down(self, request: Request) -> Response:
        """Takes {"subscription"}: its leader is to move to another node, if there is one. Raises `Conflict`."""
        return self._allowed(request, self._step_down)

    def _allowed(self, request: Request, act: Callable[[dict[str, Any]], Response]) -> Response:
        if self._token is None:
            return refusal(403, "this node is read only: start it with SUBLET_ADMIN_TOKEN to allow actions.")
        if request.bearer is None or not hmac.compare_digest(request.bearer.encode(), self._token.encode()):
            return refusal(
                401,
                "the admin token is missing or wrong: send Authorization: Bearer TOKEN.",
                **{"WWW-Authenticate": 'Bearer realm="sublet"'},
            )
        told = request.object()
        log.info("by the admin token: %s %s", request.path.rpartition("/")[2], _text(told, "subscription"))
        return act(told)

    def _instruct(self, told: dict[str, Any], order: Order) -> Response:
        wanted = Subscription.parse(_text(told, "subscription"))
        group, changed = instruct(self._url, wanted, order)
        done = {"subscription": str(wanted), "group_id": group.group_id, "changed": changed}
        return as_json({**done, "paused": group.orders.paused})

    def _step_down(self, told: dict[str, Any]) -> Response:
        wanted = Subscription.parse(_text(told, "subscription"))
        with connect(self._url, application_name="sublet http") as connection:
            overview = describe(connection, wanted)
            leader = overview.leader
            if leader is None or not overview.led:
                raise Conflict(f"nobody leads {wanted}: there is nobody to step down.")
            if len(live_nodes(connection)) < 2:
                raise Conflict(f"node {leader.node} is the only one that can lead {wanted}: start another one first.")
            step_down(connection, [LedGroup(overview.group.group_id, leader.term, str(wanted))])
        return as_json({"subscription": str(wanted), "group_id": overview.group.group_id, "term": leader.term})


def _text(told: dict[str, Any], name: str, default: str | None = None) -> str:
    found = told.get(name, default)
    if not isinstance(found, str):
        raise UsageError(f"the body must have {name!r}, a text.")
    return found
