"""What may be said of a place for payloads, what is refused, and that nothing secret is repeated."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from sublet_protocol.domain.errors import InvalidSetting, PayloadUnavailable
from sublet_storage.objects.allowed_locations import find_refusal, read_allowed_endpoints
from sublet_storage.objects.location import (
    MAX_LOCATION_CHARS,
    PayloadStoreLocation,
    locate_object,
    new_object_name,
    parse_location,
)
from sublet_storage.objects.object_stores import MARKER, ObjectStore, ObjectUnusable, PayloadObjectNotFound


@pytest.mark.parametrize(
    ("text", "prefix", "options"),
    [
        ("file:///mnt/shared/sublet", "file:///mnt/shared/sublet", ()),
        ("file:///mnt/shared/sublet/", "file:///mnt/shared/sublet", ()),
        ("s3://bucket", "s3://bucket", ()),
        ("s3://bucket/a/b?region=eu-1", "s3://bucket/a/b", (("region", "eu-1"),)),
        (
            "s3://bucket/a?scheme=http&endpoint_override=store:9000",
            "s3://bucket/a",
            (("endpoint_override", "store:9000"), ("scheme", "http")),
        ),
    ],
)
def test_a_place_is_a_directory_or_a_part_of_a_bucket(text: str, prefix: str, options: object) -> None:
    place = parse_location(text)
    assert (place.prefix, place.options) == (prefix, options)
    assert parse_location(str(place)) == place


@pytest.mark.parametrize(
    "text",
    [
        "", "/mnt/shared", "file://mnt/shared", "file:///", "file:///a/../b", "file:///a//b", "file:///a?x=y",
        "file:///a#b", "file:///a%2e%2e", "file:///ä", "s3://", "s3://Bucket/a", "s3://bucket/a/./b",
        "s3://bucket?scheme=ftp", "s3://bucket?region=a b", "s3://bucket?region=a&region=a", "gs://bucket/a",
        "http://bucket/a", "s3://[bucket", "s3://[::1/a",
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"Give file:///DIRECTORY, or s3://BUCKET/PREFIX"):
        parse_location(text)


def test_a_place_has_a_greatest_length() -> None:
    """A refusal repeats only a part."""
    place = "file:///".ljust(MAX_LOCATION_CHARS, "x")
    assert str(parse_location(place)) == place
    for more in (1, 1_000_000):
        with pytest.raises(InvalidSetting, match=f"at most {MAX_LOCATION_CHARS} printable") as refused:
            parse_location(place + "x" * more)
        assert len(str(refused.value)) < 1000


@pytest.mark.conforms("X3")
@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIAEXAMPLE:hunter2@bucket/a", "s3://bucket/a?access_key=AKIAEXAMPLE&secret_key=hunter2",
        "s3://bucket/a?endpoint_override=http://AKIAEXAMPLE:hunter2@store", "file://AKIAEXAMPLE:hunter2@host/a",
        "s3://AKIAEXAMPLE:hun/hunter2@bucket/a", "s3://AKIAEXAMPLE:hun?hunter2@bucket/a", "s3://bucket/a?hunter2",
        "s3://bucket/a?region=x&AKIAEXAMPLE=1", "s3://bucket/a?hunter2=1", "s3://AKIAEXAMPLE:hunter2",
        "https://AKIAEXAMPLE/hunter2",
    ],
)  # fmt: skip
def test_credentials_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        parse_location(text)
    assert not re.search("AKIA|hunter2", str(refused.value))


ENDPOINTS = {"SUBLET_S3_ENDPOINTS": "https://store:9000, HTTP://plain/"}
"""Locations are not bound."""
BOUND = {
    "SUBLET_PAYLOAD_LOCATIONS": "s3://bucket/a",
    "SUBLET_S3_ENDPOINTS": "https://store:9000, http://127.0.0.1:9001",
}
"""Also an endpoint on this machine, where an operator may listen, and have a bucket of that name."""
LOCATIONS = {"SUBLET_PAYLOAD_LOCATIONS": "file:///srv/sublet/, s3://bucket/a,s3://whole"}
LOCAL = "(also on this machine, where SUBLET_PAYLOAD_LOCATIONS is set)"
HERE, THERE = "?endpoint_override=127.0.0.1", "?endpoint_override=store:9000"


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("allowed", "text", "refusal"),
    [
        *((ENDPOINTS, f"s3://bucket/a{options}", None) for options in (
            "", "?region=eu-1", "?scheme=http", f"{HERE}:9000&scheme=http", "?endpoint_override=[::1]:9000",
            "?endpoint_override=localhost:9000", THERE, "?endpoint_override=https://STORE:9000/",
            "?endpoint_override=plain&scheme=http",
        )),
        *((ENDPOINTS, f"s3://bucket/a?endpoint_override={endpoint}", "has the endpoint http") for endpoint in (
            "store:9000&scheme=http", "store", "store:9000/x", "other:9000", "localhost.example:9000", "10.0.0.1:9000",
        )),
        *((BOUND, f"s3://bucket/a{options}", None) for options in (
            "?region=eu-1", "?scheme=https", THERE, f"{HERE}:9001&scheme=http",
        )),
        (BOUND, f"s3://bucket/a{HERE}:9001", "endpoint https://127.0.0.1:9001, which SUBLET_S3_ENDPOINTS"),
        (BOUND, f"s3://bucket/a{HERE}:9000&scheme=http", LOCAL),
        (BOUND, "s3://bucket/a?endpoint_override=[::1]:9000", LOCAL),
        (BOUND, "s3://bucket/a?endpoint_override=localhost:9000", LOCAL),
        (BOUND, f"s3://bucket/a{THERE}&scheme=http", "endpoint http://store:9000, which SUBLET_S3_ENDPOINTS"),
        (BOUND, "s3://bucket/a?endpoint_override=http://store:9000&scheme=https", "endpoint http://store:9000, which"),
        (BOUND, "s3://bucket/a?scheme=http", "not allowed where SUBLET_PAYLOAD_LOCATIONS is set: leave it away"),
        *((LOCATIONS, text, None) for text in (
            "file:///srv/sublet", "file:///srv/sublet/orders", "s3://bucket/a/b?region=eu-1", "s3://whole/a",
        )),
        *((LOCATIONS, text, "none of those that SUBLET_PAYLOAD_LOCATIONS") for text in (
            "file:///srv/sublets", "file:///srv", "file:///tmp/mine", "file:///bucket/a", "s3://bucket/ab",
            "s3://bucket", "s3://bucket2/a", "s3://whole.mine/a",
        )),
    ],
)  # fmt: skip
def test_a_place_is_used_where_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, allowed: dict[str, str], text: str, refusal: str | None
) -> None:
    for name, value in allowed.items():
        monkeypatch.setenv(name, value)
    found = find_refusal(parse_location(text))
    assert found is None if refusal is None else refusal in str(found)


@pytest.mark.conforms("X4")
def test_no_credentials_go_to_a_port_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request would show the process's access key and session token to whoever listens there."""
    monkeypatch.setenv("SUBLET_PAYLOAD_LOCATIONS", "s3://bucket/a")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        store = ObjectStore(
            parse_location(f"s3://bucket/a?endpoint_override=127.0.0.1:{listener.getsockname()[1]}&scheme=http")
        )
        with pytest.raises(PayloadUnavailable, match=r"SUBLET_S3_ENDPOINTS .* add it"):
            store.check_marker()
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("region", ["localhost:9099/x", "evil.example", "EU-1", "eu_1", "a/b", "[::1]", "-.-"])
def test_a_region_is_no_host(region: str) -> None:
    with pytest.raises(InvalidSetting, match=r"a region of small letters, digits and hyphens only.* Give file:"):
        parse_location(f"s3://bucket/a?scheme=http&region={region}")


def test_a_store_elsewhere_is_away_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBLET_S3_ENDPOINTS", raising=False)
    with pytest.raises(PayloadUnavailable, match=r"https://store:9000, which SUBLET_S3_ENDPOINTS .* add it"):
        ObjectStore(parse_location("s3://bucket/a?endpoint_override=store:9000")).check_marker()


@pytest.mark.parametrize("text", ["store:9000", "https://", "https://user:hunter2@store", "ftp://store", "*"])
def test_what_is_no_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SUBLET_S3_ENDPOINTS", f"https://store,{text}")
    with pytest.raises(InvalidSetting, match="Give https://HOST:PORT"):
        read_allowed_endpoints()


@pytest.mark.conforms("X4")
def test_nothing_is_written_at_a_place_not_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUBLET_PAYLOAD_LOCATIONS", "file:///srv/sublet")
    with pytest.raises(PayloadUnavailable, match=r"none of those that SUBLET_PAYLOAD_LOCATIONS .* add it"):
        ObjectStore(parse_location(f"file://{tmp_path}")).write_marker("0123")
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("SUBLET_PAYLOAD_LOCATIONS")
    ObjectStore(parse_location(f"file://{tmp_path}")).check_writable()


@pytest.mark.parametrize("text", ["/srv", "file:///srv/../etc", "s3://bucket?region=eu-1", "*"])
def test_an_allowed_place_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SUBLET_PAYLOAD_LOCATIONS", f"file:///srv,{text}")
    with pytest.raises(InvalidSetting, match=r"SUBLET_PAYLOAD_LOCATIONS: .* Give "):
        find_refusal(parse_location("file:///srv/sublet"))


def test_a_name_has_its_block_and_is_new_each_time() -> None:
    one, other = new_object_name(3, 7, 100, b"payload"), new_object_name(3, 7, 100, b"payload")
    assert one.text != other.text
    place = parse_location("s3://bucket/a?region=x")
    found = locate_object(f"s3://bucket/a/{one.text}", ["file:///mnt", "s3://bucket/a?region=x", "s3://bucket"])
    assert found == (place, one)
    assert (one.generation_id, one.stream_id, one.end_offset) == (3, 7, 100)
    for elsewhere in ("a/b/", "ab/", "ab"):
        assert locate_object(f"s3://bucket/{elsewhere}{one.text}", ["s3://bucket/a"]) is None
    assert locate_object(f"s3://bucket/a/{one.text}", []) is None


def test_places_may_lie_within_one_another() -> None:
    name = new_object_name(3, 7, 100, b"payload")
    for places in (["file:///a", "file:///a/3"], ["file:///a/3", "file:///a"]):
        outer, inner = (locate_object(f"{prefix}/{name.text}", places) for prefix in ("file:///a", "file:///a/3"))
        assert outer is not None
        assert inner is not None
        assert (outer[0].prefix, inner[0].prefix) == ("file:///a", "file:///a/3")


def test_a_place_of_the_database_has_a_marker() -> None:
    name = new_object_name(3, 7, 100, b"payload")
    found = locate_object(f"s3://bucket/a/{name.text}", ["s3://bucket/a?region=x#0123"])
    assert found is not None
    assert (found[0].marker, str(found[0])) == ("0123", "s3://bucket/a?region=x")


ID, OTHER_ID = "a" * 32, "b" * 32


def store_at(place: Path, marker: str = "") -> ObjectStore:
    return ObjectStore(PayloadStoreLocation("file", str(place), marker=marker))


def test_a_place_is_known_by_its_marker(tmp_path: Path) -> None:
    for marker in ("", ID):
        with pytest.raises(PayloadUnavailable, match="is not there, or not mounted"):
            store_at(tmp_path, marker).check_marker()
    (tmp_path / MARKER).write_text("not ours")
    with pytest.raises(PayloadUnavailable, match="has no id"):
        store_at(tmp_path).write_marker(ID)
    (tmp_path / MARKER).unlink()
    assert [store_at(tmp_path).write_marker(each) for each in (ID, OTHER_ID)] == [ID, ID]
    for marker in ("", ID):
        store_at(tmp_path, marker).check_marker()
    with pytest.raises(PayloadUnavailable, match="is not the one that it was"):
        store_at(tmp_path, OTHER_ID).check_marker()


def test_what_is_no_object_is_no_place_away(tmp_path: Path) -> None:
    store_at(tmp_path).write_marker(ID)
    store = store_at(tmp_path, ID)
    with pytest.raises(PayloadObjectNotFound):
        store.get("1/2", 9)
    store.put("1/2", b"bytes")
    assert bytes(store.get("1/2", 9)) == b"bytes"
    os.mkfifo(tmp_path / "1/3")
    with pytest.raises(ObjectUnusable, match="is not a file") as refused:
        store.get("1/3", 9)
    assert refused.value.is_permanent
    for _ in range(2):
        store.delete("1/2")
    with pytest.raises(PayloadUnavailable, match="does not answer as it should"):
        store_at(tmp_path / "away").delete("1/2")
    store.note_timeout(1000)
    with pytest.raises(PayloadUnavailable, match="has not answered for 1000 s"):
        store.get("1/3", 9)
