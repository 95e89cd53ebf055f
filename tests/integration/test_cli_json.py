"""The fields of answers in JSON are those that docs/json.md has."""

from __future__ import annotations

import re

import pytest

from tests.integration.cli_kit import REPOSITORY, Shell

PAGE = REPOSITORY / "docs" / "json.md"
RULE = ["user:etl", "join", "orders/#", "--group", "billing"]
GROUP, CLONE = "$share/g/orders/#", "$share/copy/orders/#"


def documented() -> dict[str, set[str]]:
    """Return {command: the fields of its table}."""
    found = {}
    for section in re.split(r"^## sublet ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
        found[section.partition("\n")[0]] = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    return found


@pytest.mark.conforms("A9")
def test_every_answer_has_the_documented_fields(shell: Shell) -> None:
    page, checked = documented(), set()
    for command, arguments in (
        ("publish", ["orders/eu"]), ("migrate", []), ("spaces create", ["us", "us/#"]), ("spaces list", []),
        ("spaces drop", ["us", "--yes"]),
        ("groups create", [GROUP]), ("groups list", []), ("groups describe", [GROUP]), ("groups why", [GROUP]),
        ("groups export", [GROUP]), ("groups clone", [GROUP, CLONE]), ("groups pause", [GROUP]),
        ("groups reset", [GROUP, "--to-latest", "--dry-run"]), ("groups history", [GROUP]),
        ("groups delete", [GROUP, "--yes"]), ("nodes list", []), ("doctor", []),
        ("access allow", RULE), ("access check", RULE), ("access list", []), ("access revoke", RULE),
        ("access token", ["user:etl"]), ("access tokens", []),
    ):  # fmt: skip
        reported = shell.run(*command.split(), *arguments, "--json", stdin="x").object
        assert set(reported) == page[command], command
        checked.add(command)
    (token,) = shell.run("access", "tokens", "--json").object["tokens"]
    revoked = shell.run("access", "revoke-token", token["token_id"], "--json").object
    assert set(revoked) == page["access revoke-token"]
    forms = [set(shell.run("roles", *option, "--json").object) for option in ((), ("--sql",))]
    assert (set.union(*forms), set.intersection(*forms)) == (page["roles"], set())
    checked |= {"access revoke-token", "roles"}
    assert page.keys() - checked == {"tail, sublet consume", "leader", "demo"}  # the demo's: tests/unit/test_demo.py
    (line,) = shell.run("tail", "#", "--from", "earliest", "--no-follow", "--json").lines
    assert set(line) == page["tail, sublet consume"] - {"grant_id"}
