"""Whatever a database's URL looks like, what is shown of it has nothing of its password."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting
from sublet_protocol.domain.secret import Secret, hide_secrets
from sublet_storage.db.connect import FIRST_VERSION, SCHEMA_VERSION, connect, is_compatible, resolve_schema_name
from sublet_storage.db.database_url import (
    OpenedUrl,
    as_secret,
    format_url,
    parse_secret_parts,
    parse_url,
    resolve_database_url,
)
from sublet_storage.notify.drivers.postgres import PostgresNotificationDriver, channel_name

pytestmark = pytest.mark.conforms("X3")

PIECES = ("s3cr", "et99")
PASSWORDS = ("s3cret99", "s3cr@et99", "s3cr/et99", "s3cr:et99", "s3cr et99", "s3cr'et99", 's3cr"et99', "s3cr%et99",
             "s3cr%zzet99", "s3cr?et99", "s3cr#et99", "s3cr&et99", "s3cr=et99", "s3cr\\et99", "@s3cr/et99",
             "12/s3cr@et99", 's3cr"%zzet99"', "s3cr[et99", "s3cr,et99")  # fmt: skip


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:s3cret@host:5432/db", "ann@host:5432/db"),
        ("postgresql://ann@host/db?password=s3cret&sslmode=require", "ann@host/db"),
        ("postgresql://ann@host/db?sslpassword=s3cret&options=-c%20a.b%3Ds3cret&passfile=/s3cret", "ann@host/db"),
        ("host=host password='s3cret \\' more' user=ann", "ann@host"),
        ("postgresql://ann@one:1,two:65535/db", "ann@one:1,two:65535/db"),
        ("host=one,two port=5 dbname=db", "one:5,two:5/db"),
        ("postgresql://[::1]:5432/db", "::1:5432/db"),
        ("postgresql://postgres@/postgres?host=/a/b&port=5432", "postgres@/a/b:5432/postgres"),
        ("host=host dbname='postgresql://ann:s3cret@host/db'", "host/..."),
        ("postgresql://me%40corp:s3cret@host/db", "me@corp@host/db"),
        ("", ""),
    ],
)
def test_a_url_is_shown_by_its_parts(url: str, shown: str) -> None:
    assert format_url(url) == format_url(Secret(url)) == shown


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize(
    "shape",
    [
        "postgresql://ann:{}@127.0.0.1:1/db",
        "postgresql://ann@127.0.0.1:1/db?password={}",
        "postgresql+psycopg://ann:{}@127.0.0.1:1/db",
        "host=127.0.0.1 port=1 password={} user=ann",
        "host=127.0.0.1 port=1 user=ann sslpassword='{}'",
        "host=127.0.0.1 port=1 user=ann password='{}",
    ],
)
def test_no_error_has_a_piece_of_the_password(shape: str, password: str) -> None:
    """However it was written: as it is, which may be malformed, or encoded."""
    for text in {password, quote(password, safe="")}:
        url = as_secret(shape.format(text))
        with pytest.raises(Exception) as raised:  # noqa: PT011 malformed, or away
            connect(url)
        assert not any(piece in str(raised.value) for piece in PIECES), str(raised.value)
        assert raised.value.__cause__ is None
        assert not any(piece in hide_secrets(f"it is {url.reveal()}") for piece in PIECES)


@given(st.text("ab/@:?#%&='\"\\ 12[]", max_size=12))
@example("/")
@example("%a1")
@example("\udca1")
def test_no_password_is_shown_in_part(around: str) -> None:
    marked = f"{around}s3cr{around}et99"
    for url in (f"postgresql://ann:{marked}@host/db", f"host=h password={marked}", f"host=h password='{marked}'"):
        try:
            shown = format_url(url)
        except InvalidSetting as error:
            shown = str(error)
        assert not any(piece in shown for piece in PIECES)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://ann:a@b@host/db", "an @ in it is not percent-encoded, as %40"),
        ("postgresql://ann:1/b@host/db", "an @ in it is not percent-encoded"),
        ("postgresql://host:port/db", "its port is not a number from 1 to 65535"),
        ("postgresql://host:0/db", "its port is not a number from 1 to 65535"),
        ("postgresql://host:65536/db", "its port is not a number from 1 to 65535"),
        (f"postgresql://host:{'9' * 5000}/db", "its port is not a number from 1 to 65535"),
        ("postgresql://host/db?nonsense=1", "invalid URI query parameter"),
        ("host=a b", "missing = after"),
    ],
)
def test_a_malformed_url_is_shown_as_nothing(url: str, reason: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        parse_url(url)
    assert str(raised.value).startswith(f"the database URL is malformed: {reason}")
    assert "Write it as postgresql://USER:PASSWORD@HOST:PORT/DATABASE" in str(raised.value)


def test_secret_parts_are_those_that_libpq_hides() -> None:
    url = "postgresql://ann:a@host/db?sslpassword=b&sslkey=/c"
    assert parse_secret_parts(url) == {"password": "a", "sslpassword": "b"}


def test_the_explicit_url_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve_database_url(None) is None
    file = tmp_path / "url"
    file.write_text("postgresql://c/c\n")
    file.chmod(0o600)
    monkeypatch.setenv("SUBLET_DATABASE_URL_FILE", str(file))
    assert parse_url(resolve_database_url(None) or "")["host"] == "c"
    assert resolve_database_url("postgresql://a/a") == Secret("postgresql://a/a")
    monkeypatch.setenv("SUBLET_DATABASE_URL", "postgresql://b/b")
    with pytest.raises(InvalidSetting, match="both set"):
        resolve_database_url(None)
    monkeypatch.delenv("SUBLET_DATABASE_URL_FILE")
    assert resolve_database_url(None) == Secret("postgresql://b/b")


def test_a_changed_file_is_the_next_connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A malformed one does not replace the last that could be used."""
    file = tmp_path / "url"
    monkeypatch.setenv("SUBLET_DATABASE_URL_FILE", str(file))
    file.write_text("postgresql://ann:first@host/db")
    file.chmod(0o600)
    url = resolve_database_url(None)
    assert url is not None
    for text, password in (("ann:second@host", "second"), ("ann:3@r@d@host", "second"), ("ann:fourth@host", "fourth")):
        file.write_text(f"postgresql://{text}/db")
        assert parse_url(url)["password"] == password


def test_an_unreachable_server_is_named() -> None:
    """Without the password."""
    said = r"cannot connect to ann@localhost:1/db: .*refused.* Start Postgres there"
    with pytest.raises(DatabaseUnreachable, match=said) as raised:
        connect(f"postgresql://ann:{PASSWORDS[0]}@localhost:1/db")
    assert PASSWORDS[0] not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.exit_code == 5


def test_a_server_is_unreachable_without_free_files() -> None:
    """Waiting for the answer takes one more than the socket."""
    story = """
import os, socket
from sublet_protocol.domain.errors import DatabaseUnreachable
from sublet_storage.db.connect import connect
server, files = socket.create_server(("127.0.0.1", 0)), []
try:
    while True:
        files.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    os.close(files.pop())
try:
    connect(f"postgresql://127.0.0.1:{server.getsockname()[1]}/db")
except DatabaseUnreachable as error:
    assert "Too many open files" in str(error)
    raise SystemExit(7)
"""
    run = subprocess.run(["bash", "-c", 'ulimit -n 64; exec "$@"', "", sys.executable, "-c", story], check=False)
    assert run.returncode == 7


def test_a_socket_of_another_machine_is_called_one() -> None:
    with pytest.raises(DatabaseUnreachable, match="on another machine"):
        connect("postgresql://postgres@/postgres?host=/nonexistent/socket")


@pytest.mark.parametrize("name", ["Sublet", "1st", "pg_mine", "a b", 'a"b', "a" * 64, "a;drop"])
def test_a_schema_name_in_need_of_quotes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_schema_name("") == "sublet"
    with pytest.raises(InvalidSetting, match=r"1 to 63 .* Choose such a name in SUBLET_SCHEMA\.$"):
        resolve_schema_name(name)
    monkeypatch.setenv("SUBLET_SCHEMA", name)
    with pytest.raises(InvalidSetting, match=r"1 to 63 .* Choose such a name in SUBLET_SCHEMA\.$"):
        connect("postgresql://localhost:1/db")


def test_an_opened_database_keeps_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a key, and for its channel of notifications, whatever SUBLET_SCHEMA is by then."""
    url = as_secret("postgresql://ann:s3cret@host/db")
    opened = OpenedUrl(url, "one")
    monkeypatch.setenv("SUBLET_SCHEMA", "other")
    assert [resolve_schema_name(opened=each) for each in (opened, as_secret(opened), url)] == ["one", "one", "other"]
    assert len({opened, OpenedUrl(url, "one"), OpenedUrl(url, "two"), url}) == 3
    assert PostgresNotificationDriver(opened).capabilities.notify_channel == channel_name("one")


def test_a_newer_schema_says_what_it_works_with() -> None:
    """By itself it works with its own programs alone."""
    assert is_compatible(SCHEMA_VERSION, None)
    assert is_compatible(SCHEMA_VERSION, FIRST_VERSION)
    newer = f"{SCHEMA_VERSION}+"
    assert [is_compatible(newer, each) for each in (None, FIRST_VERSION, SCHEMA_VERSION, newer)] == [
        False, True, True, False,
    ]  # fmt: skip
