"""How many connections a node takes on."""

from __future__ import annotations

import pytest

from sublet_leader.server import compute_max_connections


@pytest.mark.conforms("X4")
def test_connections_leave_files_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, expected in ((256, 128), (1024, 624), (-1, 1 << 20)):
        monkeypatch.setattr("resource.getrlimit", lambda _, most=most: (most, most))
        assert compute_max_connections() == expected
