"""What may be changed of a space that is there, from the command line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sublet_storage.notify.changes import SPACE
from sublet_storage.spaces.space_queries import find_space
from tests.integration.cli_kit import Shell, done, refused
from tests.integration.log_kit import Connection
from tests.integration.notify_kit import SETTINGS, listening
from tests.kit import eventually


@pytest.mark.conforms("A9")
def test_a_space_is_altered_only_in_what_is_given(shell: Shell, conn: Connection) -> None:
    done(shell.run("spaces", "create", "orders", "orders/#", "--shards", "2", "--rollover", "1d", "--json"))
    reported = done(shell.run("spaces", "alter", "orders", "--retention", "7d", "--compression", "zstd", "--json"))
    altered = [reported[name] for name in ("retention_s", "rollover_s", "compression", "shards")]
    assert altered == [604_800, 86_400, "zstd", 2]
    assert done(shell.run("spaces", "reshard", "orders", "5", "--json"))["shards"] == 5
    assert shell.run("spaces", "alter", "orders", "--rollover", "none", "--filter", "orders/eu/#").code == 0
    space = find_space(conn, "orders")
    assert (space.retention_s, space.rollover_s, space.filter.text) == (604_800, None, "orders/eu/#")
    answer = shell.run("spaces", "alter", "orders", "--retention", "none")
    assert (answer.code, "kept for ever" in answer.err) == (0, True)
    assert find_space(conn, "orders").retention_s is None
    for code, arguments, reported in (
        (2, "orders", "nothing to change. Give --retention"),
        (2, "orders --retention 0", "must be above 0 seconds. Leave it out for no limit, or alter it to none"),
        (2, "orders --retention -5d", "duration '-5d': give a number and s, m, h"),
        (2, "orders --retention 7", "duration '7': it has no unit. Say of what: 7s, 7m, 7h"),
        (2, "orders --no-such", "No such option: --no-such"),
        (3, "none --retention 7d", "there is no such space. There are: default, orders"),
    ):
        refused(shell.run("spaces", "alter", *arguments.split()), code, reported)


@pytest.mark.conforms("D10")
def test_nodes_are_notified_of_a_changed_space(shell: Shell, database: str) -> None:
    """Of what it is now; they do not read it again for long."""
    with listening(database, settings=replace(SETTINGS, catch_up_min_interval_s=600, poll_interval_s=600)) as received:
        done(shell.run("spaces", "create", "orders", "orders/#", "--json"))
        eventually(lambda: received.of(SPACE, "orders"))


@pytest.mark.conforms("A9")
def test_a_missing_payload_location_is_a_warning(shell: Shell, tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "no such"
    there.mkdir()
    reported = f"file://{missing}: the directory is not there, or not to be seen, on this machine."
    remedy = f"mkdir -p '{missing}'"
    made = shell.run("spaces", "create", "orders", "orders/#", "--payload-location", f"file://{missing}")
    assert (made.code, f"Warning: {reported}" in made.err, remedy in made.err) == (0, True, True), made.err
    altered = shell.run("spaces", "alter", "orders", "--payload-location", f"file://{missing}", "--json")
    assert reported in done(altered)["warning"]
    assert altered.err == ""
    found = shell.run("spaces", "alter", "orders", "--payload-location", f"file://{there}", "--json")
    assert done(found)["warning"] is None
    there.rmdir()
    later = shell.run("spaces", "alter", "orders", "--tier-after", "1d")
    assert (later.code, "Warning" in later.err) == (0, False), "it was not given now"
    listed = shell.run("spaces", "list").out
    assert re.search(rf"^orders .* file://{there} +86400 s$", listed, re.MULTILINE), listed


@pytest.mark.conforms("A9")
def test_a_space_is_rolled_over_now(shell: Shell, conn: Connection) -> None:
    reported = done(shell.run("spaces", "rollover", "default", "--json"))
    ((newest, streams),) = conn.execute(
        "select generation_id, count(*) from stream where state = 'open' group by generation_id"
    ).fetchall()
    assert (reported["name"], reported["generation_id"], streams) == ("default", newest, 2)
    assert "2 new streams" in shell.run("spaces", "rollover", "default").err
    refused(shell.run("spaces", "rollover", "none"), 3, "there is no such space")
