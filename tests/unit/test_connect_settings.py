"""What `sublet_storage.db.connect` does without a server: passwords stay out of messages, malformed input is named."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting
from sublet_storage.db.connect import connect, resolve_schema_name

SECRET = "s3cr-et"


def test_an_unreachable_server_is_named() -> None:
    """Without the password."""
    said = r"cannot connect to ann@localhost:1/db: .*refused.* Start Postgres there"
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
    assert resolve_schema_name("") == "sublet"
    with pytest.raises(InvalidSetting, match="1 to 63"):
        resolve_schema_name(name)
    monkeypatch.setenv("SUBLET_SCHEMA", name)
    with pytest.raises(InvalidSetting, match="1 to 63"):
        connect("postgresql://localhost:1/db")
