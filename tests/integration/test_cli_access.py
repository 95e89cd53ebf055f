"""`sublet access`: rules and tokens are given, shown, checked and taken away."""

from __future__ import annotations

import re

import pytest

from sublet.cli.groups.names import unescape
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.session_name_owners import next_session_epoch
from tests.integration.cli_kit import Shell, a_shell, done, refused

ETL = ("user:etl", "publish", "orders/#")


def test_rules_are_given_and_checked(shell: Shell) -> None:
    assert "nodes that ask who calls refuse all" in shell.run("access", "list").err
    rule = {"principal": "user:etl", "right": "publish", "filter": "orders/#", "group": None}
    assert done(shell.run("access", "allow", *ETL, "--json")) == {**rule, "changed": True}
    assert done(shell.run("access", "allow", *ETL, "--json")) == {**rule, "changed": False}
    assert shell.run("access", "allow", "user:spark", "join", "orders/#", "--group", "team-*").code == 0
    (listed,) = done(shell.run("access", "list", "user:etl", "--json"))["rules"]
    assert {name: listed[name] for name in rule} == rule
    assert listed["granted_by"].startswith("database user")
    lines = shell.run("access", "list").out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["user:etl", "publish", "orders/#", "-"],
        ["user:spark", "join", "orders/#", "team-*"],
    ]
    yes = shell.run("access", "check", "user:etl", "publish", "orders/eu")
    assert (yes.code, yes.out) == (0, "yes: user:etl publish orders/#\n")
    no = shell.run("access", "check", "user:etl", "publish", "bills/eu")
    assert (no.code, no.out) == (1, "no: no rule allows user:etl publish bills/eu\n")
    for group, code in (("team-a", 0), ("other", 1)):
        found = shell.run("access", "check", "user:spark", "join", "orders/eu", "--group", group, "--json")
        assert (found.code, found.object["allowed"]) == (code, code == 0)
    assert shell.run("access", "check", "user:spark", "join", "orders/eu").code == 1, "of all groups"


def test_a_rule_is_revoked_as_it_was_given(shell: Shell) -> None:
    shell.run("access", "allow", *ETL)
    shell.run("access", "allow", "*", "publish", "#")
    refused(
        shell.run("access", "revoke", "user:etl", "publish", "orders/eu"), 3, "as it was given", "access list user:etl"
    )
    reported = shell.run("access", "revoke", *ETL)
    assert (reported.code, "still allowed by: * publish #" in reported.err) == (0, True)
    refused(shell.run("access", "revoke", *ETL), 3, "there is none")
    assert shell.run("access", "check", *ETL).out == "yes: * publish #\n"


def test_a_row_that_is_no_rule_is_listed_as_such(shell: Shell, database: str) -> None:
    shell.run("access", "allow", *ETL)
    with connect(database) as connection:
        connection.execute("insert into access values ('user:x', 'read', 'a/#/b', '*', 'somebody')")
    listed = shell.run("access", "list")
    assert (listed.code, len(listed.out.splitlines())) == (0, 2)
    assert "user:x read a/#/b *, by somebody: no rule, allows nothing: filter" in listed.err
    answer = done(shell.run("access", "list", "--json"))
    assert [each["principal"] for each in answer["rules"]] == ["user:etl"]
    assert [each["row"] for each in answer["unreadable"]] == ["user:x read a/#/b *"]
    assert shell.run("access", "check", *ETL).code == 0


def test_a_token_is_shown_once(shell: Shell) -> None:
    longest = ("--expires", "3650d", "--note", "x" * 200)
    assert done(shell.run("access", "token", "user:other", *longest, "--json"))["token"]
    made = shell.run("access", "token", "user:etl", "--note", "nightly")
    (token,) = made.out.splitlines()
    assert re.fullmatch(r"sub_[a-z2-7]{8}_[A-Za-z0-9_-]{43}", token)
    assert token not in made.err
    second = done(shell.run("access", "token", "user:etl", "--expires", "1h", "--json"))
    refused(shell.run("access", "token", "user:etl"), 4, "has 2 valid tokens", token[4:12])
    shown = shell.run("access", "tokens", "--json")
    entries = [each for each in done(shown)["tokens"] if each["principal"] == "user:etl"]
    assert [(each["token_id"], each["principal"], each["note"], each["is_valid"]) for each in entries] == [
        (token[4:12], "user:etl", "nightly", True),
        (second["token_id"], "user:etl", "", True),
    ]
    assert second["token"] not in shown.out + shell.run("access", "tokens").out
    assert token[13:] not in shown.out
    assert shell.run("access", "revoke-token", token[4:12]).code == 0
    assert done(shell.run("access", "revoke-token", token[4:12], "--json"))["changed"] is False
    assert "revoked" in shell.run("access", "tokens").out
    refused(shell.run("access", "revoke-token", "nonsense"), 3, "nonsense", "sublet access tokens")


@pytest.mark.parametrize("group", ["$share/g/#", "$share/\\ufe0f/#"], ids=ascii)
def test_a_sessions_name_is_released(shell: Shell, database: str, group: str) -> None:
    """Also of a group that is shown with an escape."""
    name = (group, "etl")
    with connect(database) as connection:
        next_session_epoch(connection, Subscription.parse(unescape(group)), name[1], "user:etl")
    assert done(shell.run("access", "release-session", *name, "--json"))["principal"] == "user:etl"
    refused(shell.run("access", "release-session", *name), 3, "nothing to release")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("allow", "etl", "publish", "#"), "Write user:etl"),
        (("allow", "user:etl", "write", "#"), "publish, read, join, watch, operate"),
        (("allow", "user:etl", "publish", "a/#/b"), "# stands alone in the last level"),
        (("allow", "user:etl", "publish", "#", "--group", "g"), "Leave --group out"),
        (("allow", "user:etl", "join", "#", "--group", "a*b"), "team-*"),
        (("token", "*"), "Write user:NAME"),
        (("token", "user:etl", "--expires", "90"), "it has no unit"),
        (("token", "user:etl", "--expires", "0s"), "--expires '0s'"),
        (("token", "user:etl", "--expires", "4000d"), "at most 3650d"),
        (("token", "user:etl", "--note", "x" * 201), "at most 200 printable characters"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], said: str) -> None:
    with a_shell(SUBLET_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none") as shell:
        refused(shell.run("access", *arguments), 2, said)
