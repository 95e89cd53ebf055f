"""The URL of a database: its sources, its parts, and which of them may be shown.

It is a secret, as it may contain a password. It is parsed as libpq does it, and what is shown is made of the parts that
are found; of one that cannot be parsed nothing is shown, since the position of the password in it is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Self
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.secret import Secret, read_secret_setting

SETTING = "SUBLET_DATABASE_URL"
_SHAPE = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, special characters percent-encoded"
_SCHEME = re.compile(r"\w[\w+.-]*://")
_HOST = re.compile(r"[\w.:%-]*|[/@].*")
_SHOWN = re.compile(r"[\w.$@ +-]*")
"""What a user or database that is shown consists of: another one may be a URL itself."""


class OpenedUrl(Secret):
    """The URL of a database that was opened, with the schema of its tables, where every later connection finds them."""

    __slots__ = ("schema",)
    schema: str

    def __new__(cls, url: Secret, schema: str) -> Self:
        self = super().__new__(cls, url._source, url._parts)
        self.schema = schema
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenedUrl) and self.schema == other.schema and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.schema, super().__hash__()))


def resolve_database_url(explicit: str | None) -> Secret | None:
    """Return the given URL, else that of SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE, else None (which means the
    embedded server). Raise `InvalidSetting`."""
    return as_secret(explicit) if explicit else read_secret_setting(SETTING, _find_secret_texts, parse_url)


def as_secret(url: str | Callable[[], str]) -> Secret:
    """Return a URL, or what reads one, as a secret; one that is a secret already is returned unchanged."""
    return url if isinstance(url, Secret) else Secret(url, _find_secret_texts)


def parse_url(url: str) -> dict[str, Any]:
    """Return the parts of a URL, or a key=value string, by libpq's names. Raise `InvalidSetting`."""
    text = url.reveal() if isinstance(url, Secret) else url
    try:
        parts = dict(conninfo_to_dict(text))
    except psycopg.ProgrammingError as error:
        raise _malformed_error(_strip_values(str(error).strip())) from None
    except UnicodeError:
        raise _malformed_error("it is not UTF-8") from None
    if _has_stray_at(text):
        raise _malformed_error("an @ in it is not percent-encoded, as %40")
    if not all(_HOST.fullmatch(host) for host in str(parts.get("host") or "").split(",")):
        raise _malformed_error("its host has characters that no host has")
    for port in str(parts.get("port") or "").split(","):
        if port and not (port.isascii() and port.isdigit() and len(port) < 9 and 0 < int(port) < 65536):
            raise _malformed_error("its port is not a number from 1 to 65535")
    return parts


def format_url(url: str) -> str:
    """Return user@host:port/database, as far as the URL has them. Raise `InvalidSetting`."""
    parts = {name: str(value) for name, value in parse_url(url).items() if value}
    hosts = (parts.get("host") or parts.get("hostaddr") or "").split(",")
    ports = parts.get("port", "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else [*ports, *[""] * len(hosts)]
    addresses = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))
    user, database = _mask(parts.get("user", "")), _mask(parts.get("dbname", ""))
    return (f"{user}@" if user else "") + addresses + (f"/{database}" if database else "")


def parse_secret_parts(url: str) -> dict[str, str]:
    """Return the parts that are secret. Raise `InvalidSetting`."""
    return {name: str(value) for name, value in parse_url(url).items() if value and name in _list_secret_names()}


@cache
def _list_secret_names() -> set[str]:
    """Return the options that libpq hides as they are typed, and two of its keys."""
    options = psycopg.pq.Conninfo.get_defaults()
    hidden = {option.keyword.decode() for option in options if option.dispchar == b"*"}
    return hidden | {"scram_client_key", "scram_server_key"}


def _find_secret_texts(text: str) -> Collection[str]:
    """Return what of a URL must not be shown: all of one that cannot be parsed, else secrets, also encoded."""
    try:
        secrets = parse_secret_parts(text).values()
    except InvalidSetting:
        return (text,)
    return [text, *secrets, *(quote(each, safe="") for each in secrets)] if secrets else ()


def _has_stray_at(text: str) -> bool:
    """Return whether a URL has another @ than that behind the user: the password may contain it, and be longer than
    libpq takes it to be."""
    scheme = _SCHEME.match(text)
    prefix, separator, suffix = text[scheme.end() :].partition("@") if scheme else ("", "", "")
    return bool(separator) and ("/" in prefix or "@" in suffix)


def _mask(text: str) -> str:
    return text if _SHOWN.fullmatch(text) else "..."


def _malformed_error(reason: str) -> InvalidSetting:
    return InvalidSetting(
        f"the database URL is malformed: {reason}. Write it as {_SHAPE}; for SQLAlchemy's postgresql+psycopg://, drop "
        "the +psycopg."
    )


def _strip_values(reason: str) -> str:
    """Return the message up to the value that libpq quotes because it could not parse it: it may be a piece of the
    password."""
    return reason.replace('missing "="', "missing =").partition('"')[0].strip(" :")
