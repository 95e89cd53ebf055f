"""What a query's processes are given of the database, and where they find the rest."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.spark.common.database_credentials import driver_url, task_address, task_url
from sublet_borrower.spark.common.source_options import stream_options
from sublet_borrower.spark.sink.options import write_options
from sublet_borrower.spark.source.batch_options import batch_options
from sublet_borrower.spark.source.micro_batch_transaction import Guard
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.secret import Secret
from sublet_storage.db.database_url import parse_url
from tests.kit import private_file

pytestmark = pytest.mark.conforms("X3")

SECRET = "postgresql://ann:s3cret@host:5432/db?sslpassword=s3cret&options=-c%20a.b%3D1&sslmode=require"
ADDRESS = "user=ann dbname=db host=host port=5432 sslmode=require"


def from_vault() -> str:
    """What a `class:` may name."""
    return "password=from-vault"


def nothing() -> None:
    """What it may not."""


def from_variable() -> str:
    """A URL, as of a vault."""
    return os.environ["TEST_LOGIN"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*(f"{__name__}.{name}" for name in ("from_vault", "nothing", "no_name", "from_variable")), "nowhere.name")
    monkeypatch.setenv("SUBLET_CREDENTIALS_CLASSES", ", ".join(names))


@pytest.fixture(params=["env", "file", "class"])
def source(request: pytest.FixtureRequest, called: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where a login is: a function that puts a URL there and returns the credentials."""

    def put(url: str) -> str:
        if request.param == "file":
            return f"file:{private_file(tmp_path / 'url', url)}"
        monkeypatch.setenv("SUBLET_DATABASE_URL" if request.param == "env" else "TEST_LOGIN", url)
        return "env" if request.param == "env" else f"class:{__name__}.from_variable"

    return put


LOGIN = "postgresql://etl:s3cret@db.example/app?sslmode=verify-full&sslrootcert=/ca.crt&require_auth=scram-sha-256"
FROM_OPTION = "postgresql://etl@db.example/app"


@pytest.mark.parametrize(
    "part",
    [
        "hostaddr=127.0.0.1", "service=x", "sslmode=disable", "sslmode=", "sslrootcert=/x", "sslkey=/x",
        "ssl_min_protocol_version=TLSv1", "require_auth=password", "channel_binding=disable", "gssencmode=disable",
        "passfile=/x",
    ],
)  # fmt: skip
def test_a_url_changes_nothing_of_a_login(source: Any, part: str) -> None:
    credentials = source(LOGIN)
    url = task_url(task_address(f"{FROM_OPTION}?{part}"), credentials)
    with pytest.raises(InvalidSetting, match=f"URL has {part}, and that .* Leave it out of the first URL") as raised:
        url.reveal()
    assert "s3cret" not in str(raised.value)


def test_a_url_adds_only_what_is_harmless(source: Any) -> None:
    credentials = source(LOGIN)
    for part in ("", "?sslmode=verify-full", "?port=5432"):
        assert parse_url(task_url(FROM_OPTION + part, credentials)) == parse_url(LOGIN)
    times = "connect_timeout=3&application_name=a&target_session_attrs=primary"
    assert parse_url(task_url(f"{FROM_OPTION}?{times}", credentials)) == parse_url(f"{LOGIN}&{times}")


@pytest.mark.parametrize(
    ("login", "url"),
    [
        (LOGIN, "postgresql://etl@db.example:6543/app"),
        (LOGIN, "postgresql://etl@/app?hostaddr=127.0.0.1"),
        (LOGIN, "postgresql://etl@db.example/other"),
        (LOGIN, "service=x user=etl"),
        ("postgresql://etl:s3cret@/app", FROM_OPTION),
        ("postgresql://etl:s3cret@db.example", FROM_OPTION),
        ("postgresql://etl:s3cret@/app?service=x", FROM_OPTION),
    ],
)
def test_no_other_database_gets_a_password(source: Any, login: str, url: str) -> None:
    credentials = source(login)
    if credentials == "env":
        assert parse_url(task_url(url, credentials)) == parse_url(url)
        return
    with pytest.raises(InvalidSetting, match=r"Correct one of them"):
        task_url(url, credentials).reveal()


def test_a_password_alone_keeps_its_demands(source: Any) -> None:
    credentials = source("password=s3cret sslmode=verify-full")
    if credentials == "env":
        assert parse_url(task_url(FROM_OPTION, credentials)) == parse_url(FROM_OPTION)
        return
    assert parse_url(task_url(f"{FROM_OPTION}?sslrootcert=/ca.crt", credentials)) == parse_url(
        "postgresql://etl:s3cret@db.example/app?sslmode=verify-full&sslrootcert=/ca.crt"
    )
    with pytest.raises(InvalidSetting, match="URL has sslmode=disable"):
        task_url(f"{FROM_OPTION}?sslmode=disable", credentials).reveal()


def test_an_option_names_no_code(called: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "abort", lambda: "password=s3cret")
    for name in ("os.abort", f"{__name__}.from", "antigravity.x"):
        with pytest.raises(InvalidSetting, match=f"CLASSES of process .* does not name {name}, and .* where driver"):
            task_url(FROM_OPTION, f"class:{name}")


def test_what_travels_has_no_secret(called: None) -> None:
    assert parse_url(task_address(SECRET)) == parse_url(ADDRESS)
    url = task_url(ADDRESS, f"class:{__name__}.from_vault")
    assert parse_url(url)["password"] == "from-vault"
    assert b"from-vault" not in pickle.dumps(url)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (stream_options, {"subscription": "$share/g/#", "sessionName": "s"}),
        (batch_options, {}),
        (write_options, {"topic": "a"}),
    ],
)
def test_an_option_with_a_secret_is_refused(options: Any, given: dict[str, str]) -> None:
    for name, value in (
        ("url", "postgresql://ann:s3cret@host/db"),
        ("url", "postgresql://ann@host/db?options=s3cret"),
        ("password", "s3cret"),
        ("adminToken", "s3cret"),
        ("agent_key", "s3cret"),
    ):
        with pytest.raises(InvalidSetting, match=r"SUBLET_DATABASE_URL_FILE, or by credentials file:PATH") as raised:
            options({**given, name: value})
        assert name in str(raised.value)
        assert "s3cret" not in str(raised.value)
    malformed = ("class:s3cret", "class:os.s3cret-", "s3cret:os.abort", "s3cret:/a")
    for credentials in ("s3cret", "file:s3cret", *malformed, "env:s3cret", ""):
        with pytest.raises(InvalidSetting, match=r"credentials") as raised:
            options({**given, "credentials": credentials})
        assert "s3cret" not in str(raised.value)
    assert options({**given, "url": "postgresql://ann@host/db", "credentials": "file:/a"}).credentials == "file:/a"


def test_a_guard_takes_no_password() -> None:
    with pytest.raises(InvalidSetting, match="password"):
        Guard("checkpoint", SECRET)


def test_env_adds_what_belongs_to_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse_url(task_url(ADDRESS, "env")) == parse_url(ADDRESS)
    monkeypatch.setenv("SUBLET_DATABASE_URL", SECRET)
    assert parse_url(task_url(ADDRESS, "env")) == parse_url(SECRET)
    for other in ("user=ann dbname=other host=host", "user=bob dbname=db host=host", "host=h dbname=db user=ann"):
        assert parse_url(task_url(other, "env")) == parse_url(other)
    monkeypatch.setenv("SUBLET_DATABASE_URL", "password=s3cret")
    assert parse_url(task_url(ADDRESS, "env")) == parse_url(ADDRESS), "it is for no database"
    monkeypatch.delenv("SUBLET_DATABASE_URL")
    file = private_file(tmp_path / "url", "postgresql://ann:first@host/db?sslmode=require")
    monkeypatch.setenv("SUBLET_DATABASE_URL_FILE", str(file))
    url = task_url(ADDRESS, "env")
    file.write_text("postgresql://ann:second@host/db?sslmode=require")
    assert parse_url(url)["password"] == "second"


def test_credentials_are_of_a_file_or_a_call(tmp_path: Path, called: None) -> None:
    file = private_file(tmp_path / "url", "postgresql://bob:in-file@host:5432/db?sslmode=require")
    assert parse_url(task_url(ADDRESS, f"file:{file}")) == parse_url(ADDRESS) | {"user": "bob", "password": "in-file"}
    vault = f"class:{__name__}.from_vault"
    assert parse_url(task_url(ADDRESS, vault)) == parse_url(ADDRESS) | {"password": "from-vault"}
    assert task_url(ADDRESS, vault) == task_url(ADDRESS, vault)
    file.write_text("postgresql://bob:in-file@elsewhere/db")
    with pytest.raises(InvalidSetting, match="are for bob@elsewhere/db, and the database is ann@host:5432/db"):
        task_url(ADDRESS, f"file:{file}").reveal()
    with pytest.raises(InvalidSetting, match="the call returned a NoneType"):
        task_url(ADDRESS, f"class:{__name__}.nothing").reveal()
    for path in ("nowhere.name", f"{__name__}.no_name"):
        with pytest.raises(InvalidSetting, match=r"Correct the name, or install the module"):
            task_url(ADDRESS, f"class:{path}")


def test_a_driver_has_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = private_file(tmp_path / "url", "postgresql://ann:in-file@host/db")
    assert driver_url(None, None, "env") is None
    assert driver_url(None, "/data", f"file:{file}") is None
    found = driver_url(None, None, f"file:{file}")
    assert found == driver_url(None, None, f"file:{file}")
    assert parse_url(found or "")["password"] == "in-file"
    monkeypatch.setenv("SUBLET_DATABASE_URL", SECRET)
    assert driver_url(None, None, "env") == Secret(SECRET)
    assert parse_url(driver_url("postgresql://ann@host/db", None, "env") or "")["password"] == "s3cret"
    assert parse_url(driver_url("postgresql://ann@host/other", None, "env") or "")["dbname"] == "other"
