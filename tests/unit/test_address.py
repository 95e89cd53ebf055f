"""Addresses: which hosts are this machine."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.address import is_loopback_host


@pytest.mark.conforms("X7")
@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("[::1]", True),
        ("::1%eth0", True),
        ("localhost", True),
        ("127.0.0.1%2eexample.com", False),
        ("127.0.0.1%x", False),
        ("localhost.example.com", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_nothing_may_follow_a_loopback_address(host: str, is_loopback: bool) -> None:
    assert is_loopback_host(host) is is_loopback
