"""What fails for one space or generation is done for the others; a lock is waited for once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.errors import CheckViolation, LockNotAvailable

from sublet_protocol.domain.errors import MalformedRow
from sublet_storage.db.isolated_errors import select_done


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(("error", "done"), [(MalformedRow, [2, 3]), (CheckViolation, [2, 3]), (LockNotAvailable, [])])
def test_an_error_of_one_keeps_no_other(error: type[Exception], done: list[int]) -> None:
    found: list[int] = []
    conn: Any = SimpleNamespace(closed=False)
    with pytest.raises(error):
        found.extend(select_done(conn, [1, 2, 3], lambda item: item > 1 or _fail(error)))
    assert found == done


def _fail(error: type[Exception]) -> bool:
    raise error("one")
