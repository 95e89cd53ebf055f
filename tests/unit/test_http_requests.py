"""Of HTTP requests: the fields of a query and of a body, and the page of metrics, whatever formats are asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request

from sublet_leader.http import query_fields
from sublet_leader.http.app import StaticFiles
from sublet_leader.http.body_fields import (
    read_bool,
    read_json_object,
    read_number,
    read_reset_target,
    read_stream_ids,
    read_text,
    reject_unknown_fields,
)
from sublet_leader.http.probes_and_metrics import FRESH_S, HealthProbes, MetricsPage
from sublet_leader.http.query_fields import read_integer
from sublet_leader.http.settings import read_admin_token
from sublet_leader.observe.health import Health, HealthCheck, HealthState
from sublet_protocol.domain.errors import InvalidSetting, NotFound, UsageError
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_storage.groups.admin.reset_target import ResetTarget
from tests.kit import same_name


def ask(query: str) -> Request:
    return Request({"type": "http", "path": "/groups", "query_string": query.encode()})


def limit_in(query: str) -> int:
    return read_integer(ask(query), "limit", 50, 500)


@pytest.mark.parametrize(("query", "limit"), [("limit=0", 0), ("limit=500", 500), ("offset=7", 50)])
def test_a_number_in_its_range_is_taken(query: str, limit: int) -> None:
    assert limit_in(query) == limit


@pytest.mark.parametrize("value", ["-1", "501", "+1", "1.0", "", "\N{ARABIC-INDIC DIGIT THREE}", "0" * 20])
def test_another_value_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="a whole number from 0 to 500"):
        limit_in(f"limit={value}")


def test_a_text_is_there_and_can_be_stored() -> None:
    assert query_fields.read_text(ask("after=7"), "after") == "7"
    assert query_fields.read_text(ask(""), "after", "") == ""
    for query, problem in (("", r"/groups needs after: add \?after="), ("after=a%00b", "no zero character")):
        with pytest.raises(UsageError, match=problem):
            query_fields.read_text(ask(query), "after")
    assert query_fields.read_choice(ask("order=desc"), "order", "asc", ("asc", "desc")) == "desc"
    with pytest.raises(UsageError, match="must be one of asc, desc"):
        query_fields.read_choice(ask("order=up"), "order", "asc", ("asc", "desc"))


def read_body(content_type: str, body: bytes) -> object:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    headers = [(b"content-type", content_type.encode())]
    return asyncio.run(read_json_object(Request({"type": "http", "headers": headers}, receive)))


def test_a_body_is_an_object_that_says_it_is_json() -> None:
    """What a browser sends for another site's form says something else."""
    for content_type in ("application/json", "APPLICATION/JSON; charset=utf-8"):
        assert read_body(content_type, b'{"a": 1}') == {"a": 1}
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
        with pytest.raises(UsageError, match="send it with Content-Type: application/json"):
            read_body(content_type, b"{}")
    for body in (b"[]", b"1", b"null"):
        with pytest.raises(UsageError, match="must be an object"):
            read_body("application/json", body)


@pytest.mark.parametrize("is_brief", [False, True])
def test_a_probe_names_one_check(is_brief: bool) -> None:
    health = Health((HealthCheck("loop", HealthState.OK, "it turns"),))
    probes = HealthProbes("n1", lambda: health, is_brief)

    def answer(name: str) -> dict[str, str]:
        request = Request({"type": "http", "path_params": {"name": name}})
        content: dict[str, str] = json.loads(bytes(asyncio.run(probes.answer_check(request)).body))
        return content

    assert answer("loop").get("detail") == (None if is_brief else "it turns")
    live = json.loads(bytes(asyncio.run(probes.answer_live(ask(""))).body))
    assert live.get("node") == (None if is_brief else "n1")
    with pytest.raises(NotFound, match="there is no check 'none'"):
        answer("none")


def test_a_page_has_its_own_files_only() -> None:
    def serve(name: str) -> str | None:
        request = Request({"type": "http", "path_params": {"name": name}})
        return asyncio.run(StaticFiles().serve_file(request)).media_type

    assert serve("app.js") == "text/javascript; charset=utf-8"
    with pytest.raises(NotFound, match="there is no file 'server'"):
        serve("server")


def test_an_admin_token_can_be_sent_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_ADMIN_TOKEN", "x" * 16)
    assert (token := read_admin_token()) is not None
    assert token.reveal() == "x" * 16
    for bad in ("x" * 15, "x" * 16 + "\u00e9", "x" * 16 + "\n", "x" * 8 + " " + "x" * 8):
        monkeypatch.setenv("SUBLET_ADMIN_TOKEN", bad)
        with pytest.raises(InvalidSetting, match="give at least 16 of ASCII"):
            read_admin_token()


TO_GIVE = "give earliest, latest, current, or one of"


@pytest.mark.parametrize(
    ("read", "value", "problem"),
    [
        *((read_stream_ids, value, "a list of ids") for value in ("1", [0], [-1], [MAX_OFFSET + 1], [True], ["1"])),
        *((partial(read_text, name="field"), value, "must have 'field', a text") for value in (None, 1, ["a"])),
        *((partial(read_bool, name="field"), value, "must be true or false") for value in (None, 0, "true")),
        *((partial(read_number, name="field"), value, "must be a number") for value in (None, True, "1")),
        (partial(read_number, name="field"), 10**400, "more than 300 digits"),
        *((read_reset_target, value, TO_GIVE) for value in (None, "first", 1, ["latest"])),
        (read_reset_target, {"shift": True}, TO_GIVE),
        *((read_reset_target, {"offset": value}, TO_GIVE) for value in (True, 1.0, "1", None)),
        *((read_reset_target, {name: 1, "dry_run": True}, TO_GIVE) for name in ("offset", "shift")),
        *((read_reset_target, {"offsets": {text: 1}}, "it is a number") for text in ("", "-1", "one", "9" * 20)),
        *((read_reset_target, {"offsets": {"1": value}}, "it is a number") for value in (None, True, "1", 1.0)),
        (read_reset_target, {"time": "yesterday"}, "write it as"),
    ],
    ids=same_name,
)
def test_a_field_of_the_wrong_type_is_refused(read: Callable[..., object], value: Any, problem: str) -> None:
    name = "streams" if read is read_stream_ids else "to" if read is read_reset_target else "field"
    with pytest.raises(UsageError, match=problem):
        read({name: value})


def test_fields_of_a_body_are_taken() -> None:
    body = {"streams": [1, MAX_OFFSET], "to": {"shift": -1}, "force": True, "weight": 2, "reason": ""}
    assert read_stream_ids(body) == {1, MAX_OFFSET}
    assert read_reset_target(body) == ResetTarget.shift(-1)
    assert read_reset_target({"to": {"offset": 0}}) == ResetTarget.offset(0)
    assert read_reset_target({"to": {"offsets": {"7": 0}}}) == ResetTarget.offsets({7: 0})
    assert (read_bool(body, "force"), read_bool(body, "dry_run"), read_number(body, "weight")) == (True, False, 2.0)
    assert read_text(body, "reason") == ""
    reject_unknown_fields(body, *body)
    with pytest.raises(UsageError, match="the body has 'force': it takes streams, to"):
        reject_unknown_fields({"force": True}, "streams", "to")


def test_a_page_is_cached_for_a_second() -> None:
    """And not for every version that was ever asked for."""
    now = 0.0
    registry = CollectorRegistry()
    gauge = Gauge("one", "One.", registry=registry)
    page = MetricsPage(registry, lambda: now)

    def reported(version: str) -> bytes:
        accept = f"application/openmetrics-text;version={version}"
        return bytes(page.render(Request({"type": "http", "headers": [(b"accept", accept.encode())]})).body)

    gauge.set(1)
    first = reported("1.0.0")
    gauge.set(2)
    assert reported("1.0.0") == first
    now += FRESH_S
    assert b"one 2.0" in reported("1.0.1")
    now -= FRESH_S
    assert b"one 2.0" in reported("1.0.0"), "the old page is not there any more"
