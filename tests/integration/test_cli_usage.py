"""What the command line asks, refuses before it begins, and takes for the name of a group."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions
from tests.integration.cli_kit import Shell, a_shell, done, refused

USAGE = 2


@pytest.fixture
def shell(database: str) -> Iterator[Shell]:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        yield shell


@pytest.mark.conforms("A9")
def test_a_topic_with_a_wildcard_is_refused_before_anything_is_read(shell: Shell) -> None:
    for topic, layout in (("a/#", "lines"), ("+/a", "ndjson")):
        answer = shell.run("publish", topic, "--format", layout)
        refused(answer, USAGE, f"topic '{topic}': a topic has no wildcards")
        assert "durable" not in answer.err


@pytest.mark.conforms("A9")
def test_for_programs_what_would_have_to_be_asked_is_refused_as_an_object(shell: Shell) -> None:
    assert shell.run("groups", "create", "$share/g/#").code == 0
    assert shell.run("spaces", "create", "us", "us/#").code == 0
    for command in (
        ("groups", "reset", "$share/g/#", "--to-earliest"), ("groups", "delete", "$share/g/#"), ("spaces", "drop", "us")
    ):  # fmt: skip
        answer = shell.run(*command, "--json", stdin="y\n")
        refused(answer, USAGE, "Nothing was ", "Give --yes.")
        assert json.loads(answer.err)["exit_code"] == USAGE
        assert done(shell.run(*command, "--json", "--yes"))


@pytest.mark.conforms("A9")
def test_who_consumes_joins_the_group_that_was_printed_and_else_makes_the_one_that_was_typed(
    shell: Shell, database: str
) -> None:
    printed, literal = "$share/a\\u202eb/#", "$share/c\\u202ed/#"
    store = PostgresGroupStore(database)
    store.declare_group(Subscription("share", "a\u202eb", TopicFilter("#")), GroupOptions())
    store.close()
    shell.leader("n1")
    for given in (printed, literal):
        assert shell.run("consume", given, "--idle-timeout", "3s").code == 0
    listed = shell.run("groups", "list", "--json").object["groups"]
    assert {group["subscription"] for group in listed} == {"$share/a\u202eb/#", literal}
    through_node = shell.run("consume", printed, "--node", "127.0.0.1:1")
    refused(through_node, USAGE, "nodes cannot be asked which group", "consume without --node")
