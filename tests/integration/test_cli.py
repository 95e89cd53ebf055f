"""The command line on its way from messages to consumers: real processes, a real database."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.cli_kit import Shell, a_shell
from tests.integration.log_kit import Connection
from tests.kit import eventually

GROUP = "$share/billing/#"


def described(shell: Shell, group: str = GROUP) -> Any:
    answer = shell.run("groups", "describe", group, "--json")
    assert answer.code == 0, answer.err
    return answer.object


def values(text: str) -> list[str]:
    return [json.loads(line)["value"] for line in text.splitlines()]


@pytest.mark.conforms("A9")
def test_an_embedded_database_is_enough(server_home: Path) -> None:
    with a_shell(SUBLET_DATA_DIR=str(server_home / "data")) as shell:
        shell.leader("n1")
        published = shell.run("publish", "orders/eu", "--key", "k", "--json", stdin="one\ntwo\nthree")
        assert published.code == 0, published.err
        assert (published.object["read"], published.object["durable"]) == (3, 3)
        seen = shell.run("tail", "orders/+", "--from", "earliest", "--no-follow")
        assert seen.out == "orders/eu\tk\tone\norders/eu\tk\ttwo\norders/eu\tk\tthree\n"
        consumed = shell.run("consume", "$share/g/orders/#", "--from", "earliest", "--max-messages", "3", "--json")
        assert [(row["value"], row["offset"]) for row in consumed.lines] == [("one", 0), ("two", 1), ("three", 2)]
        assert consumed.code == 0
        assert described(shell, "$share/g/orders/#")["lag"] == 0


def test_publish_shows_progress_of_what_nobody_types(database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=database, FORCE_COLOR="1") as shell:
        assert "publishing" in shell.run("publish", "a", stdin="1\n").err


def test_all_goes_through_ndjson_unchanged(shell: Shell) -> None:
    records = [
        {"key": {"base64": "/wA="}, "value": {"base64": "/w=="}, "headers": [["a", "b"], ["a", None]], "topic": "t/1"},
        {"value": {"id": 1}, "timestamp": "2026-01-31T12:00:00.000001Z"},
        {"value": None, "key": "é"},
    ]
    text = "\n".join(map(json.dumps, records))
    assert shell.run("publish", "t/2", "--format", "ndjson", stdin=text).code == 0
    first = shell.run("tail", "#", "--from", "earliest", "--no-follow", "--json")
    assert shell.run("publish", "--format", "ndjson", stdin=first.out).code == 0
    rows = shell.run("tail", "#", "--from", "earliest", "--no-follow", "--json").lines
    messages = [{name: row[name] for name in ("topic", "key", "value", "headers", "timestamp")} for row in rows]
    assert len(messages) == 6
    for message in messages:
        assert messages.count(message) == 2
    by_topic = {(row["topic"], str(row["value"])): row for row in messages}
    binary = by_topic["t/1", "{'base64': '/w=='}"]
    assert (binary["key"], binary["headers"]) == ({"base64": "/wA="}, [["a", "b"], ["a", None]])
    assert by_topic["t/2", '{"id":1}']["timestamp"] == "2026-01-31T12:00:00.000001Z"
    assert by_topic["t/2", "None"]["key"] == "é"


@pytest.mark.long
def test_tail_begins_and_ends_where_it_is_asked_to(shell: Shell) -> None:
    shell.run("publish", "a", "--key", "k", stdin="0\n1\n2\n3\n")
    for start, limit, found in (
        ("2", "--no-follow", "23"), ("15m", "--no-follow", "0123"), ("2999-01-01", "--no-follow", ""),
        ("earliest", "--max-messages=1", "0"),
    ):  # fmt: skip
        assert values(shell.run("tail", "a", "--from", start, limit, "--json").out) == list(found)
    following = shell.start("tail", "#", "--from", "3", "--max-messages", "3", "--json")
    following.says('"value":"3"')
    shell.run("publish", "a", "--key", "k", stdin="4\n5\n6\n")
    answer = following.end()
    assert (answer.code, values(answer.out)) == (0, ["3", "4", "5"])


def test_tail_keeps_the_order_across_generations(shell: Shell) -> None:
    following = shell.start("tail", "#", "--from", "earliest", "--json", "--max-messages", "300")
    for generation, shards in enumerate((4, 1, 7)):
        assert shell.run("spaces", "reshard", "default", str(shards)).code == 0
        lines = "\n".join(f'{{"key":"k{n % 5}","value":"{generation * 100 + n:03}"}}' for n in range(100))
        assert shell.run("publish", "t", "--format", "ndjson", stdin=lines).code == 0
    for answer in (following.end(), shell.run("tail", "#", "--from", "earliest", "--no-follow", "--json")):
        assert len(answer.lines) == 300
        by_key: dict[str, list[str]] = {}
        for row in answer.lines:
            by_key.setdefault(row["key"], []).append(row["value"])
        assert all(found == sorted(found) and len(found) == 60 for found in by_key.values())


@pytest.mark.conforms("A2", "A3", "A9")
def test_describe_shows_who_holds_what(shell: Shell) -> None:
    shell.leader("n1")
    consumer = shell.start("consume", GROUP, "--name", "worker-1", "--json")

    group = eventually(lambda: (it := described(shell))["streams_by_status"] == {"held": 16} and it, 60)
    assert (group["state"], group["leader"]["node"], group["leader"]["alive"]) == ("consuming", "n1", True)
    (member,) = group["members"]
    assert (member["session"], len(member["streams"])) == ("worker-1", 16)
    assert {line["session"] for line in group["streams"]} == {"worker-1"}
    shell.run("publish", "a", stdin="".join(f"{n}\n" for n in range(500)))
    eventually(lambda: len(consumer.out.splitlines()) == 500, 30)
    eventually(lambda: described(shell)["lag"] == 0, 60)
    answer = consumer.ask(signal.SIGINT)
    assert answer.code == 130
    assert sorted(map(int, values(answer.out))) == list(range(500))
    group = described(shell)
    assert (group["streams_by_status"], group["lag"], group["state"]) == ({"free": 16}, 0, "no_members")
    assert "worker-1" not in shell.run("groups", "describe", GROUP).out
    (listed,) = shell.run("groups", "list", "--json").object["groups"]
    assert (listed["subscription"], listed["lag"]) == (GROUP, 0)


@pytest.mark.conforms("A2")
@pytest.mark.long
def test_members_that_hold_nothing_stand_by(shell: Shell) -> None:
    shell.run("spaces", "reshard", "default", "1")
    node = shell.leader("n1")
    for name in ("first", "second"):
        shell.start("consume", "$share/few/#", "--name", name)

    def standing_by() -> Any:
        group = described(shell, "$share/few/#")
        return len(group["members"]) == 1 and group["standby_members"] and group

    group = eventually(standing_by, 60)
    (holder,), (standby,) = group["members"], group["standby_members"]
    assert {holder["session"], standby["session"]} == {"first", "second"}
    shown = shell.run("groups", "describe", "$share/few/#").out
    assert "1 holding streams, 1 standing by" in shown
    assert f"  {standby['session']} {standby['agent']}: stands by" in shown
    node.process.send_signal(signal.SIGSTOP)
    assert described(shell, "$share/few/#")["standby_members"] is None
    assert "its leader does not answer" in shell.run("groups", "describe", "$share/few/#").out
    node.process.send_signal(signal.SIGCONT)


@pytest.mark.conforms("A2")
def test_groups_are_described_without_a_leader(shell: Shell) -> None:
    node = shell.leader("n1")
    assert shell.run("consume", GROUP, "--idle-timeout", "0.5s").code == 0
    shell.run("publish", "a", stdin="1\n2\n")
    assert node.ask(signal.SIGTERM).code == 0
    shell.run("spaces", "reshard", "default", "2")
    shell.run("publish", "a", stdin="3\n")
    group = described(shell)
    assert (group["state"], group["leader"]["alive"], group["lag"]) == ("no_consumers", False, 3)
    assert group["streams_by_status"] == {"free": 16, "new": 2}
    (listed,) = shell.run("groups", "list", "--json").object["groups"]
    assert listed.pop("leader")["term"] == group["leader"]["term"]
    assert listed == {name: group[name] for name in listed}, "the list says the same"
    assert "no consumers" in shell.run("groups", "describe", GROUP).out


def test_max_acknowledges_exactly_what_was_printed(shell: Shell) -> None:
    shell.leader("n1")
    shell.run("publish", "a", stdin="0\n1\n2\n3\n4\n")
    runs = [shell.run("consume", GROUP, "--from", "earliest", "--max-messages", "2", "--json") for _ in range(2)]
    assert [values(run.out) for run in runs] == [["0", "1"], ["2", "3"]]
    assert described(shell)["lag"] == 1


def test_only_what_was_written_is_acknowledged(shell: Shell, tmp_path: Path) -> None:
    """Where a write is cut short, by a file that may not grow, with Python's buffering of stdout turned off, too."""
    shell.leader("n1")
    shell.run("publish", "a", stdin="".join(f"{n}\n" for n in range(1000)))
    unbuffered = {**shell.environment, "PYTHONUNBUFFERED": "1"}
    command = shell.argv("consume", GROUP, "--from", "earliest", "--max-messages", "1000")
    with (written := tmp_path / "written").open("wb") as output:
        ended = subprocess.run(
            ["sh", "-c", 'ulimit -f 4; "$@"', "sh", *command],
            cwd=shell.directory, env=unbuffered, stdout=output, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (1, b"sublet: [Errno 27] File too large.\n")
    assert written.stat().st_size == 2048
    assert described(shell)["lag"] == 1000


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.long
def test_an_interrupted_publish_keeps_what_it_has_read(shell: Shell, number: signal.Signals, code: int) -> None:
    publishing = shell.start("publish", "a", "--json", stdin=subprocess.PIPE)
    publishing.stdin.write(b"".join(b"%d\n" % n for n in range(1000)) + b"half a li")
    publishing.stdin.flush()
    shown = ("tail", "#", "--from", "earliest", "--no-follow", "--json")
    eventually(lambda: len(shell.run(*shown).lines) == 1000, 30)
    answer = publishing.ask(number)
    assert answer.code == code, answer.err
    assert (answer.object["durable"], answer.object["interrupted"]) == (1000, True)
    assert len(shell.run(*shown).lines) == 1000


def test_a_hangup_ends_a_waiting_publish(shell: Shell, conn: Connection, tmp_path: Path) -> None:
    (file := tmp_path / "lines").write_text("0\n")
    with conn.transaction():
        conn.execute("lock table stream in exclusive mode")
        publishing = shell.start("publish", "a", "--file", str(file), "--json")
        eventually(lambda: conn.execute("select from pg_locks where not granted").fetchall(), 30, publishing.output)
        answer = publishing.ask(signal.SIGHUP)
    assert answer.code == 129, answer.err
    assert (answer.object["durable"], answer.object["interrupted"]) == (0, True)


@pytest.mark.long
def test_a_closed_pipe_ends_a_command_quietly(shell: Shell) -> None:
    shell.leader("n1")
    shell.run("publish", "a", stdin="0\n1\n2\n")
    for command in (("tail", "#", "--from", "earliest"), ("consume", GROUP, "--from", "earliest")):
        with subprocess.Popen(
            ["sh", "-c", '"$@" | head -1', "sh", *shell.argv(*command)],
            cwd=shell.directory, env=shell.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as running:  # fmt: skip
            while running.poll() is None:
                shell.run("publish", "a", stdin="more\n")
            out, err = running.communicate(timeout=60)
        assert out.splitlines() == [b"a\t\t0"]
        assert b"rror" not in err
        assert b"roken" not in err


def test_a_closed_pipe_is_seen_without_a_message(shell: Shell) -> None:
    """No message comes once the reader has gone, nor has one when nothing was printed."""
    node = shell.leader("n1")
    shell.run("publish", "a", stdin="0\n1\n2\n")
    shell.run("groups", "create", GROUP, "--from", "earliest")
    through = ("--node", node.address)
    for command, reader in (
        (("tail", "#", "--from", "earliest"), "head -1"),
        (("tail", "#", "--from", "earliest", "--epochs"), "head -1"),
        (("tail", "#", "--from", "earliest", *through), "head -1"),
        (("tail", "#"), "true"),
        (("consume", GROUP), "head -1"),
        (("consume", GROUP, *through), "true"),
        (("groups", "watch", GROUP), "true"),
    ):
        piped = ["sh", "-c", f'"$@" | {reader}', "sh", *shell.argv(*command)]
        ended = subprocess.run(
            piped, cwd=shell.directory, env=shell.environment, capture_output=True, check=False, timeout=60
        )
        assert len(ended.stdout.splitlines()) == (reader == "head -1"), command
        assert b"rror" not in ended.stderr, command


def test_any_message_is_printed_in_any_locale(shell: Shell) -> None:
    """As UTF-8, which it was published as; a terminal's own encoding is not tried here."""
    shell.run("publish", "a/ü", stdin="€\n")
    shell.environment |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for unbuffered in ("", "1"):
        shell.environment["PYTHONUNBUFFERED"] = unbuffered
        command = shell.argv("tail", "#", "--from", "earliest", "--no-follow")
        ended = subprocess.run(
            command, cwd=shell.directory, env=shell.environment, capture_output=True, check=False, timeout=60
        )
        assert (ended.returncode, ended.stdout.decode()) == (0, "a/ü\t\t€\n"), ended.stderr


def test_a_help_that_cannot_be_written(shell: Shell) -> None:
    for command in (["--help"], ["--version"], ["groups", "--help"]):
        with Path("/dev/full").open("wb") as full:
            argv = shell.argv(*command)
            ended = subprocess.run(
                argv, cwd=shell.directory, env=shell.environment, stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert (ended.returncode, ended.stderr) == (1, b"sublet: [Errno 28] No space left on device.\n"), command


@pytest.mark.conforms("A9")
def test_the_version_is_printed_in_json_too(shell: Shell) -> None:
    """What other commands answer is in `test_cli_json.py`."""
    version = shell.run("--version").out
    assert version.startswith("sublet ")
    for arguments in (["--json", "--version"], ["--version", "--json"]):
        assert shell.run(*arguments).object == {"version": version.removeprefix("sublet ").strip()}
    misplaced = shell.run("--json", "groups", "list")
    assert misplaced.code == 2
    assert "--json belongs behind the command: sublet groups ... --json" in " ".join(misplaced.err.split())


@pytest.mark.conforms("A9")
def test_a_node_writes_json_lines(shell: Shell) -> None:
    node = shell.leader("n1", "--json")
    answer = node.ask(signal.SIGTERM)
    assert answer.code == 0
    assert all(line["node"] == "n1" for line in answer.lines)
    assert [line["message"].split(" on ")[0] for line in answer.lines] == ["node n1 serves", "node n1 has stopped"]


COMMANDS = (
    "demo", "leader", "migrate", "publish", "tail", "consume", "spaces create", "spaces list", "spaces reshard",
    "spaces alter", "spaces rollover", "groups create", "groups list", "groups describe",
    "groups delete", "groups history", "groups why", "groups clone", "groups import", "access allow", "access list",
    "access revoke", "access check", "access token", "access tokens", "access revoke-token",
)  # fmt: skip
EXIT_CODES = "Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 conflict, 5 unavailable"


def test_help_is_complete_and_needs_no_database() -> None:
    with a_shell(SUBLET_DATABASE_URL="nonsense") as shell:
        for command in COMMANDS:
            answer = shell.run(*command.split(), "--help")
            assert answer.code == 0, command
            for text in (f"Usage: sublet {command} ", EXIT_CODES, "--json", "--debug", "--help", "Example"):
                assert text in answer.out, command
            assert f"\n    sublet {command}" in answer.out or f"| sublet {command}" in answer.out, command
            assert "\x1b[" not in answer.out, command
        groups = {group: shell.run(*group.split(), "--help").out for group in ("", "groups", "spaces", "access")}
        for command in COMMANDS:
            group, _, name = command.rpartition(" ")
            (line,) = (text for text in groups[group].splitlines() if text.startswith(f"  {name} "))
            assert not line.endswith("..."), line
        assert all("Exit codes: 0 ok" in text for text in groups.values())


def test_a_shell_completes_commands(shell: Shell) -> None:
    shell.environment |= {"_SUBLET_COMPLETE": "complete_bash", "COMP_WORDS": "sublet groups w", "COMP_CWORD": "2"}
    assert sorted(shell.run().out.split()) == ["watch", "weight", "why"]


def test_help_explains_what_is_easily_misunderstood(shell: Shell) -> None:
    reported = " ".join(shell.run("consume", "--help").out.split())
    assert "the one started last stays" in reported
    assert "the other ends as fenced, with exit code 4" in reported
    reported = " ".join(shell.run("groups", "history", "--help").out.split())
    assert "in [from, to), to is the first offset that is not in doubt" in reported


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


def processes_about(place: Path) -> list[str]:
    """The command lines and environments of living processes that name this directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values()]
            if process.status() != psutil.STATUS_ZOMBIE and any(str(place) in word for word in words):
                found.append(f"{process.pid} {process.cmdline()}")
    return found


@pytest.mark.long
@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
def test_ctrl_c_leaves_nothing_running(server_home: Path, at_once: bool) -> None:
    """At once is as where a terminal runs them in one job: none finds the others alive."""
    with a_shell(SUBLET_DATA_DIR=str(server_home / "data")) as shell:
        shell.forks = False  # processes are found by their environment
        node = shell.leader("n1")
        consumer = shell.start("consume", GROUP, "--json")
        eventually(lambda: described(shell)["streams_by_status"] == {"held": 16}, 30)
        following = shell.start("tail", "#", "--from", "earliest", "--json")
        assert shell.run("publish", "a", stdin="x\n").code == 0
        for running in (consumer, following):
            running.says('"value":"x"')
        job = (consumer, node, following) if at_once else (consumer, following, node)
        if at_once:
            for running in job:
                running.process.send_signal(signal.SIGINT)
        for running in job:
            answer = running.end() if at_once else running.ask(signal.SIGINT)
            assert (answer.code, "Traceback" in answer.err) == (130, False), answer.err
    eventually(lambda: not processes_about(server_home), 60, lambda: "\n".join(processes_about(server_home)))


def test_ctrl_c_while_libraries_are_loaded_is_clean(shell: Shell) -> None:
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sublet.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from sublet.cli import main\nmain()"
    )
    answer = shell.start("groups", "list", program=program).end()
    assert (answer.code, answer.err) == (130, "")
