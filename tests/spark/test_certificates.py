"""Sessions in Spark's executors at a node that asks for client certificates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from sublet_borrower.spark.job.consumption import Consumption
from sublet_protocol.domain.access.rights import Right
from tests.integration.access_kit import allow, revoke, rule
from tests.integration.tls_kit import HOST, Certificates
from tests.kit import eventually
from tests.spark.stage import WAIT_S, Stage
from tests.spark.work import Recorder

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.conforms("X1")]

JOBS = "spiffe://example/jobs"
JOIN = rule(JOBS, Right.JOIN, "#", "spark")


def test_tasks_consume_under_their_certificate(
    stage: Stage, start: Callable[..., Consumption], spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no token."""
    authority = Certificates(tmp_path / "tls")
    certificate, key = authority.write("node", HOST)
    tls = {"SUBLET_TLS_CERT": certificate, "SUBLET_TLS_KEY": key, "SUBLET_TLS_CLIENT_CA": str(authority.ca)}
    stage.fleet.extra = {**tls, "SUBLET_AUTH": "required"}
    allow(stage.connection, JOIN)
    stage.serve("n1")
    certificate, key = authority.write_named("jobs", x509.UniformResourceIdentifier(JOBS))
    shown = {"SUBLET_TLS_CA": str(authority.ca), "SUBLET_TLS_CERT": certificate, "SUBLET_TLS_KEY": key}
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(spark.sparkContext.environment, name, value)
    stage.publish(300)
    start(Recorder(str(stage.records)), tasks=2)
    eventually(stage.consumed, WAIT_S, lambda: str(stage.lendings()))
    assert stage.connection.execute("select created_by from consumer_group").fetchall() == [(JOBS,)]
    revoke(stage.connection, JOIN)
    eventually(lambda: not stage.holders(), WAIT_S, lambda: str(stage.holders()))
