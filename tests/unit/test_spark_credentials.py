"""What a query's processes are given of the database, and where they find the rest."""

from __future__ import annotations

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

pytestmark = pytest.mark.conforms("X3")

SECRET = "postgresql://ann:s3cret@host:5432/db?sslpassword=s3cret&options=-c%20a.b%3D1&sslmode=require"
ADDRESS = "user=ann dbname=db host=host port=5432 sslmode=require"


def from_vault() -> str:
    """What a `class:` may name."""
    return "password=from-vault"


def nothing() -> None:
    """What it may not."""


def test_an_address_has_no_secret() -> None:
    assert parse_url(task_address(SECRET)) == parse_url(ADDRESS)


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
    for credentials in ("s3cret", "file:s3cret", "class:s3cret", "env:s3cret", ""):
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
    monkeypatch.delenv("SUBLET_DATABASE_URL")
    file = tmp_path / "url"
    monkeypatch.setenv("SUBLET_DATABASE_URL_FILE", str(file))
    file.write_text("postgresql://ann:first@host/db")
    file.chmod(0o600)
    url = task_url(ADDRESS, "env")
    file.write_text("postgresql://ann:second@host/db")
    assert parse_url(url)["password"] == "second"


def test_credentials_are_of_a_file_or_a_call(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("postgresql://bob:in-file@host/db")
    file.chmod(0o600)
    assert parse_url(task_url(ADDRESS, f"file:{file}")) == parse_url(ADDRESS) | {"user": "bob", "password": "in-file"}
    called = f"class:{__name__}.from_vault"
    assert parse_url(task_url(ADDRESS, called)) == parse_url(ADDRESS) | {"password": "from-vault"}
    assert task_url(ADDRESS, called) == task_url(ADDRESS, called)
    file.write_text("postgresql://bob:in-file@elsewhere/db")
    with pytest.raises(InvalidSetting, match="are for bob@elsewhere/db, and the database is ann@host:5432/db"):
        task_url(ADDRESS, f"file:{file}").reveal()
    with pytest.raises(InvalidSetting, match="the call returned a NoneType"):
        task_url(ADDRESS, f"class:{__name__}.nothing").reveal()
    for path in ("nowhere.name", f"{__name__}.no_name"):
        with pytest.raises(InvalidSetting, match=r"Correct the name, or install the module"):
            task_url(ADDRESS, f"class:{path}")


def test_a_driver_has_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("postgresql://ann:in-file@host/db")
    file.chmod(0o600)
    assert driver_url(None, None, "env") is None
    assert driver_url(None, "/data", f"file:{file}") is None
    found = driver_url(None, None, f"file:{file}")
    assert found == driver_url(None, None, f"file:{file}")
    assert parse_url(found or "")["password"] == "in-file"
    monkeypatch.setenv("SUBLET_DATABASE_URL", SECRET)
    assert driver_url(None, None, "env") == Secret(SECRET)
    assert parse_url(driver_url("postgresql://ann@host/db", None, "env") or "")["password"] == "s3cret"


def test_a_url_does_not_travel() -> None:
    assert b"s3cret" not in pickle.dumps(task_url(ADDRESS, f"class:{__name__}.from_vault"))
