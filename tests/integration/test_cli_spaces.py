"""What may be changed of a space that is there, from the command line."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from storage.catalogue import find_space
from tests.integration.cli_kit import Shell, done, refused


@pytest.mark.conforms("A9")
def test_a_space_is_altered_in_what_is_given_and_stays_as_it_is_in_the_rest(
    shell: Shell, conn: psycopg.Connection[Any]
) -> None:
    done(shell.run("spaces", "create", "orders", "orders/#", "--shards", "2", "--rollover", "1d", "--json"))
    told = done(shell.run("spaces", "alter", "orders", "--retention", "7d", "--compression", "zstd", "--json"))
    assert (told["retention_s"], told["rollover_s"], told["compression"], told["shards"]) == (
        604_800,
        86_400,
        "zstd",
        2,
    )
    assert shell.run("spaces", "alter", "orders", "--rollover", "none", "--filter", "orders/eu/#").code == 0
    space = find_space(conn, "orders")
    assert (space.retention_s, space.rollover_s, space.filter.text) == (604_800, None, "orders/eu/#")
    answer = shell.run("spaces", "retention", "orders", "none")
    assert (answer.code, "keeps messages for ever" in answer.err) == (0, True)
    assert find_space(conn, "orders").retention_s is None
    refused(shell.run("spaces", "alter", "orders"), 2, "nothing to change. Give --retention")
    refused(shell.run("spaces", "retention", "orders", "soon"), 2, "duration 'soon'")
    refused(shell.run("spaces", "retention", "orders", "7"), 2, "duration '7': it has no unit. Say of what: 7s, 7m, 7h")
    refused(shell.run("spaces", "retention", "none", "7d"), 3, "there is no such space. There are: default, orders")


@pytest.mark.conforms("A9")
def test_a_space_is_rolled_over_now(shell: Shell, conn: psycopg.Connection[Any]) -> None:
    told = done(shell.run("spaces", "rollover", "default", "--json"))
    ((newest, streams),) = conn.execute(
        "select generation_id, count(*) from stream where state = 'open' group by generation_id"
    ).fetchall()
    assert (told["name"], told["generation_id"], streams) == ("default", newest, 2)
    assert "2 new streams" in shell.run("spaces", "rollover", "default").err
    refused(shell.run("spaces", "rollover", "none"), 3, "there is no such space")
