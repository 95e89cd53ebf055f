"""Parses and checks payload locations, and names their objects.

`file:///DIRECTORY`, or `s3://BUCKET/PREFIX` with options behind a `?`. Credentials are not part of it: it is stored in
the database, and shown to every user. An object is called LOCATION/GENERATION/STREAM-END-DIGEST-TOKEN, by the block
that it belongs to, the digest of its bytes, and a token that makes the name new each time.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import parse_qsl, urlsplit

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from sublet_protocol.domain.errors import InvalidSetting

OPTIONS = ("endpoint_override", "region", "scheme")
"""The options that may follow the `?` of an S3 location."""

MAX_LOCATION_CHARS = 1024
MAX_SHOWN_CHARS = 200
"""How much of a malformed location is shown in an error."""

_PATH = re.compile(r"(/[A-Za-z0-9_.@:=+~ -]+)*")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_REGION = re.compile(r"[a-z0-9-]+")
"""It becomes a part of the host that is asked: with a dot, slash or colon in it that host could be any."""
_VALUE = re.compile(r"[A-Za-z0-9.:/\[\]_-]+")
NAME = r"(\d+)/(\d+)-(\d+)-([0-9a-f]{32})-[0-9a-f]{16}"
"""The pattern of an object's name, relative to its location; also for Postgres."""

_NAME = re.compile(NAME)
_PLAIN = re.compile(r"[A-Za-z0-9.-]*")
_SHAPES = "file:///DIRECTORY, or s3://BUCKET/PREFIX with ?endpoint_override=HOST:PORT&scheme=http&region=NAME as needed"


class PayloadStoreLocation(Struct, frozen=True):
    """A parsed location. `scheme` is file or s3; `root` an absolute path, or BUCKET/PREFIX; `options` those of
    `OPTIONS` that it has.

    `marker`: the id in its marker; empty: it is not known.
    """

    scheme: str
    root: str
    options: tuple[tuple[str, str], ...] = ()
    marker: str = ""

    @property
    def prefix(self) -> str:
        """Return the beginning of the URI of each of its objects, before a slash."""
        return f"{self.scheme}://{self.root}"

    def __str__(self) -> str:
        query = "&".join(f"{name}={value}" for name, value in self.options)
        return f"{self.prefix}?{query}" if query else self.prefix


class PayloadObjectName(Struct, frozen=True):
    """The name of an object: its block, and the digest of its bytes. `text`: relative to the location."""

    generation_id: int
    stream_id: int
    end_offset: int
    digest: str
    text: str


def parse_location(text: str) -> PayloadStoreLocation:
    """Parse a location. Raise `InvalidSetting`, which repeats nothing that could be a secret."""
    shown = _mask(text)
    if len(text) > MAX_LOCATION_CHARS or not text.isascii() or not text.isprintable():
        raise _invalid_error(shown, f"at most {MAX_LOCATION_CHARS} printable ASCII characters")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise _invalid_error(shown, "a URI, without brackets around the host") from None
    if parts.fragment or "@" in parts.netloc or "@" in parts.query:
        raise _invalid_error(
            shown, "without user, password or fragment: credentials come from the environment or the store's own files"
        )
    path = parts.path.rstrip("/")
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise _invalid_error(
            shown, "a plain path, without empty parts, . and .., and of letters, digits and _.@:=+~- only"
        )
    if parts.scheme == "file":
        if parts.netloc or parts.query or not path:
            raise _invalid_error(shown, "file:// and an absolute directory other than /, without a host and options")
        return PayloadStoreLocation("file", path)
    if parts.scheme != "s3":
        raise _invalid_error(shown, "of the scheme file or s3")
    if not _BUCKET.fullmatch(parts.netloc):
        rule = (
            "s3:// and a bucket: 3 to 63 small letters, digits, dots and hyphens, with a letter or digit at both ends"
        )
        raise _invalid_error(shown, rule)
    return PayloadStoreLocation("s3", parts.netloc + path, _parse_options(shown, parts.query))


def _parse_options(shown: str, query: str) -> tuple[tuple[str, str], ...]:
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise _invalid_error(shown, "with each option once")
    if options.keys() - set(OPTIONS):
        raise _invalid_error(shown, f"without other options than {', '.join(OPTIONS)}")
    if not all(_VALUE.fullmatch(value) for value in options.values()) or options.get("scheme", "https") not in (
        "http",
        "https",
    ):
        raise _invalid_error(shown, "values of letters, digits and .:/[]_- only, and http or https as scheme")
    if not _REGION.fullmatch(options.get("region", "none")):
        raise _invalid_error(shown, "a region of small letters, digits and hyphens only, such as eu-central-1")
    return tuple(sorted(options.items()))


def _invalid_error(shown: str, rule: str) -> InvalidSetting:
    return InvalidSetting(f"payloads {shown!r}: a payload location is {rule}. Give {_SHAPES}.")


def _mask(text: str) -> str:
    """Return scheme, bucket and path of what looks like a location; else nothing, as a secret may be anywhere."""
    try:
        scheme, netloc, path, *_ = urlsplit(text[:MAX_SHOWN_CHARS])
    except ValueError:
        return "..."
    is_location = scheme in ("file", "s3") and "@" not in text and _PLAIN.fullmatch(netloc) and _PATH.fullmatch(path)
    return f"{scheme}://{netloc}{path}" if is_location else "..."


@lru_cache(maxsize=256)
def parse_stored_location(text: str) -> PayloadStoreLocation:
    """Return a location as the database has it: with the id in its marker behind a #."""
    location, _, marker = text.partition("#")
    return replace(parse_location(location), marker=marker)


def new_object_name(
    generation_id: int, stream_id: int, end_offset: int, payload: bytes | memoryview
) -> PayloadObjectName:
    """Return a new name for the object of this block."""
    of_bytes = compute_digest(payload)
    text = f"{generation_id}/{stream_id}-{end_offset}-{of_bytes}-{secrets.token_hex(8)}"
    return PayloadObjectName(generation_id, stream_id, end_offset, of_bytes, text)


def compute_digest(payload: bytes | memoryview) -> str:
    """Return the digest of the bytes."""
    return xxhash.xxh3_128_hexdigest(payload)


def format_location(text: str) -> str:
    """Return the same for people."""
    return text.partition("#")[0]


def locate_object(uri: str, locations: Iterable[str]) -> tuple[PayloadStoreLocation, PayloadObjectName] | None:
    """Return the location and the name of an object; None if it is not the name of one, or is in none of these
    locations, which may be nested."""
    for location in map(parse_stored_location, locations):
        if not uri.startswith(f"{location.prefix}/"):
            continue
        text = uri[len(location.prefix) + 1 :]
        matched = _NAME.fullmatch(text)
        if matched is not None:
            generation_id, stream_id, end_offset = map(int, matched.groups()[:3])
            return location, PayloadObjectName(generation_id, stream_id, end_offset, matched[4], text)
    return None
