"""What `sublet_storage.db.connect` does without a server: passwords stay out of messages, malformed input is named."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting
from sublet_storage.db.connect import connect, database_url, redact, schema_name

SECRET = "s3cr-et"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://ann:{SECRET}@host:5432/db", "postgresql://ann:***@host:5432/db"),
        (f"postgresql://ann:{SECRET}/@{SECRET}@host/db", "postgresql://ann:***@host/db"),
        (f"postgresql://ann@host/db?password={SECRET}&x=1", "postgresql://ann@host/db?password=***&x=1"),
        (f"postgresql://ann@host/db?sslpassword={SECRET}", "postgresql://ann@host/db?sslpassword=***"),
        (f"host=host password={SECRET} user=ann", "host=host password=*** user=ann"),
        (f"host=host password = '{SECRET} with \\' blanks' user=ann", "host=host password = *** user=ann"),
        (f"postgresql+psycopg://ann:{SECRET}@host/db", "postgresql+psycopg://ann:***@host/db"),
        ("postgresql://ann@host:5432/db", "postgresql://ann@host:5432/db"),
        ("postgresql://postgres@/postgres?host=/a/b&port=5432", "postgresql://postgres@/postgres?host=/a/b&port=5432"),
    ],
)
def test_redact_hides_the_password_and_nothing_else(url: str, shown: str) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://ann:{SECRET}@localhost/db",
        f"postgresql://ann:{SECRET}@localhost/db?no_such_option={SECRET}x",
        f"host=localhost password={SECRET} no_such_option=1",
    ],
)
def test_a_malformed_url_is_refused_without_password(url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"is malformed .* Write it as postgresql://") as raised:
        connect(url)
    assert f":{SECRET}@" not in str(raised.value)
    assert f"password={SECRET}" not in str(raised.value)


def test_an_unreachable_server_is_named() -> None:
    """Without the password."""
    said = r"ann:\*\*\*@localhost:1/db: .*refused.* Start Postgres there"
    with pytest.raises(DatabaseUnreachable, match=said) as raised:
        connect(f"postgresql://ann:{SECRET}@localhost:1/db")
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.exit_code == 5


def test_a_socket_of_another_machine_is_called_one() -> None:
    with pytest.raises(DatabaseUnreachable, match="on another machine"):
        connect("postgresql://postgres@/postgres?host=/nonexistent/socket")


@pytest.mark.parametrize("name", ["Sublet", "1st", "pg_mine", "a b", 'a"b', "a" * 64, "a;drop"])
def test_a_schema_name_in_need_of_quotes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert schema_name("") == "sublet"
    with pytest.raises(InvalidSetting, match="1 to 63"):
        schema_name(name)
    monkeypatch.setenv("SUBLET_SCHEMA", name)
    with pytest.raises(InvalidSetting, match="1 to 63"):
        connect("postgresql://localhost:1/db")


def test_the_explicit_url_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert database_url(None) is None
    monkeypatch.setenv("SUBLET_DATABASE_URL", "postgresql://b/b")
    assert database_url(None) == "postgresql://b/b"
    assert database_url("postgresql://a/a") == "postgresql://a/a"
