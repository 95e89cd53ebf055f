"""Whatever is asked over HTTP: no error of the node's own, no hang, and nothing for who is not known.

Requests are drawn for each route: methods, queries, headers and bodies, right ones and others."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest

from tests.integration.http_kit import Answer, Http
from tests.integration.test_gate_http import GETS, GROUP, OPEN, POSTS, Tokens, conn, node, served, tokens
from tests.kit_nodes import Process

__all__ = ["conn", "node", "served", "tokens"]

pytestmark = [pytest.mark.conforms("X1", "X4", "X7"), pytest.mark.timeout(600)]

SEED, REQUESTS = 1, 600
"""REQUESTS: of each route."""

RIGHTS = {("GET", path): who for path, (_, who) in GETS.items()}
RIGHTS |= {("POST", path): who for path, (_, who, _) in POSTS.items()}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW")
STRANGERS = ("none", "wrong", "expired", "revoked")
KINDS = (*STRANGERS, "reader", "watcher", "operator", *["all"] * 9)
TYPES = (*["application/json"] * 9, "APPLICATION/JSON; charset=utf-16", "text/plain", "", ";")
WORDS = (
    *(GROUP, "$share/other/orders/#", "$share/new/#", "earliest", "latest", "lag", "desc", "even", "fail", "n1"),
    *("loop", "", "0", "7", "-1", "1e400", "9" * 5000, "x" * 5000, "\0", "\ud800", "\u202e", "%", "a b", "\U0010ffff"),
    *("2026-01-31T12:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-01-31"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2.5, -0.0, 1 << 63, -(1 << 63), 10**400, float("inf"), float("nan"), [], {}),
)
QUERY = ("search", "sort", "order", "limit", "offset", "subscription", "after", "another")
FIELDS: dict[str, tuple[str, ...]] = {
    "create": (
        *("starting_position", "on_data_loss", "strategy", "session_expiry_s", "atomic", "on_poison"),
        "holds_retention",
    ),
    "pause": ("reason",),
    "weight": ("session", "weight"),
    "reset": ("to", "streams", "dry_run", "force"),
    "drain": ("node", "draining", "force"),
}
"""Of a body, by the last part of its route, beside `subscription`."""

PLACES = ("offset", "shift", "time", "epoch", "offsets")


@dataclass(frozen=True, slots=True)
class HttpRequestCase:
    """A request. `who`: whose right it needs, of `test_gate_http`; None where it is for no route."""

    path: str
    method: str
    kind: str
    headers: dict[str, str]
    body: bytes
    who: str | None


def draw(dice: random.Random, right_method: str, route: str) -> HttpRequestCase:
    method = right_method if dice.randrange(9) else dice.choice(METHODS)
    path = route.replace("{name}", quoted(dice.choice(WORDS))[:2000])
    elsewhere = not dice.randrange(12)
    if elsewhere:
        path += f"/{quoted(dice.choice(WORDS))[:99]}/x"
    names = [dice.choice(QUERY) for _ in range(dice.randrange(4))]
    query = "&".join(f"{name}={quoted(dice.choice(WORDS))}" for name in names)
    who = None if elsewhere else RIGHTS.get(("GET" if method == "HEAD" else method, route))
    body = json.dumps(drawn_body(dice, route.rpartition("/")[2])).encode() if dice.randrange(9) else dice.randbytes(20)
    headers = {"Content-Type": dice.choice(TYPES), dice.choice(("Accept", "Cookie", "Range", "X-Y")): "x"}
    return HttpRequestCase(
        f"{path}?{query}"[:9000], method, dice.choice(KINDS), headers, b"" if method in ("GET", "HEAD") else body, who
    )


def quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def drawn_body(dice: random.Random, last: str) -> Any:
    if not dice.randrange(12):
        return drawn_value(dice)
    fields = [name for name in FIELDS.get(last, ()) if dice.randrange(4)]
    body = {name: drawn_place(dice) if name == "to" and dice.randrange(4) else drawn_value(dice) for name in fields}
    if last != "drain" or not dice.randrange(9):
        body["subscription"] = dice.choice((GROUP, GROUP, GROUP, "$share/other/orders/#", drawn_value(dice)))
    if not dice.randrange(12):
        body[dice.choice(WORDS)] = drawn_value(dice)
    return body


def drawn_place(dice: random.Random) -> Any:
    if not dice.randrange(3):
        return dice.choice(("earliest", "latest", "current"))
    return {dice.choice(PLACES): drawn_value(dice) for _ in range(dice.choice((1, 1, 1, 2)))}


def drawn_value(dice: random.Random, depth: int = 2) -> Any:
    match dice.randrange(9 if depth else 7):
        case 7:
            return [drawn_value(dice, depth - 1) for _ in range(dice.randrange(4))]
        case 8:
            return {dice.choice(WORDS): drawn_value(dice, depth - 1) for _ in range(dice.randrange(3))}
        case number:
            return dice.choice(VALUES if number < 5 else WORDS)


def check(asked: HttpRequestCase, answer: Answer) -> None:
    probes = asked.path.startswith("/readyz")
    assert answer.status < 500 or (answer.status == 503 and probes)
    assert b"Traceback" not in answer.body
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.status >= 400 and asked.method != "HEAD" and not probes:
        assert isinstance(answer.object["error"], str)
    if asked.who is None:
        assert answer.status in (404, 405)
    elif asked.who != OPEN and asked.kind in STRANGERS:
        assert answer.status == 401
    elif asked.who != OPEN and asked.kind == "reader":
        assert answer.status in ((200, 400) if asked.path.startswith("/api/v1/groups") else (400, 403))


@pytest.mark.long
def test_any_request_is_answered_or_refused(node: Http, tokens: Tokens, served: Process) -> None:
    dice = random.Random(SEED)
    for method, route in sorted(RIGHTS) * REQUESTS:
        asked = draw(dice, method, route)
        token = tokens[asked.kind]
        headers = asked.headers | ({} if token is None else {"Authorization": f"Bearer {token}"})
        answer = node.ask(asked.path, asked.method, headers, asked.body)
        try:
            check(asked, answer)
        except (AssertionError, ValueError, KeyError) as error:
            raise AssertionError(f"{asked}\n{answer.status} {answer.body[:500]!r}") from error
    assert node.ask("/healthz").status == 200
    assert "Traceback" not in served.output()
