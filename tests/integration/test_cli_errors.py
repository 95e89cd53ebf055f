"""Bad input and missing parts: one clear sentence, the right exit code, no traceback, no secret."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sublet.cli.base.command import CliCommandContext
from sublet.cli.messages import consume
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.db.connect import SCHEMA_VERSION, connect
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions, StartingPosition
from sublet_storage.node_directory import NodeIncarnation, register
from tests.integration.cli_kit import REPOSITORY, Shell, a_shell, done, refused
from tests.kit import eventually, private_file
from tools.source_path import source_path

USAGE, NOT_FOUND, CONFLICT, UNAVAILABLE = 2, 3, 4, 5


GROUP = "$share/g/#"
REFUSED: list[tuple[int, list[str], str]] = [
    (USAGE, ["leeder"], "leeder"),
    (USAGE, ["publish"], "sublet publish TOPIC"),
    (USAGE, ["publish", "a/+"], "topic 'a/+': a topic has no wildcards"),
    (USAGE, ["publish", "$SYS/a", "--format", "ndjson"], "what begins with $ is reserved"),
    (USAGE, ["publish", "a", "--file", "/nowhere"], "/nowhere"),
    (USAGE, ["publish", "a", "--format", "xml"], "'xml' is not one of 'lines', 'ndjson'"),
    (USAGE, ["tail"], "Missing argument 'FILTER'"),
    (USAGE, ["tail", "a/#/b"], "filter 'a/#/b': # stands alone in the last level"),
    (USAGE, ["tail", "a", "--from", "noon"], "--from 'noon': give earliest, latest"),
    (USAGE, ["tail", "a", "--max-messages", "many"], "--max-messages 'many': give a whole number"),
    (USAGE, ["consume", "orders/#"], "$share/GROUP/FILTER"),
    (USAGE, ["consume", f"$share/{'g' * 256}/x"], "at most 255 characters"),
    (USAGE, ["consume", GROUP, "--idle-timeout", "10"], "duration '10': it has no unit"),
    (USAGE, ["consume", GROUP, "--node", "foo"], "node 'foo': a leader node's address is HOST:PORT"),
    (USAGE, ["consume", GROUP, "--name", "n" * 256], "it has 256 bytes of UTF-8, and at most 255 are allowed"),
    (USAGE, ["consume", GROUP, "--from", "yesterday"], "--from 'yesterday': a group starts at latest"),
    (UNAVAILABLE, ["consume", GROUP, "--idle-timeout", "0.2s"], "start one with `sublet leader`"),
    (USAGE, ["groups", "create", "$share/g/a/#/b"], "filter 'a/#/b': # stands alone in the last level"),
    (USAGE, ["groups", "create", GROUP, "--from", "2026-11-21T10:00:00"], "Add the time zone"),
    (USAGE, ["groups", "create", GROUP, "--from", "offset:-1"], "'offset:-1': an offset is a whole number"),
    (USAGE, ["groups", "create", GROUP, "--strategy", "best"], "strategy 'best' is not known"),
    (USAGE, ["groups", "create", GROUP, "--session-expiry", "soon"], "duration 'soon'"),
    (USAGE, ["groups", "create", GROUP, "--session-expiry", "1000w"], "session expiry 604800000.0"),
    (USAGE, ["groups", "create", GROUP, "--on-data-loss", "wait"], "'wait' is not one of 'fail', 'skip'"),
    (USAGE, ["groups", "describe", "$share//a"], "a group's name is not empty"),
    (NOT_FOUND, ["groups", "describe", GROUP], "group '$share/g/#': there is no such group"),
    (USAGE, ["groups", "history", GROUP, "--limit", "0"], "--limit '0': give a whole number of at least 1"),
    (USAGE, ["groups", "history", GROUP, "--stream", "x"], "--stream 'x': give a whole number"),
    (NOT_FOUND, ["groups", "history", GROUP], "group '$share/g/#': there is no such group"),
    (USAGE, ["groups", "reset", GROUP], "0 positions to go on from: give one of --to-earliest"),
    (USAGE, ["groups", "reset", GROUP, "--to-earliest", "--to-latest"], "2 positions to go on from"),
    (USAGE, ["groups", "reset", GROUP, "--to-latest", "--timeout", "5"], "duration '5': it has no unit"),
    (USAGE, ["nodes", "drain", "n1", "--wait", "9"], "duration '9': it has no unit"),
    (USAGE, ["spaces", "create", "a b", "x/#"], "space name 'a b'"),
    (USAGE, ["spaces", "create", "a", "x/#/y"], "filter 'x/#/y': # stands alone in the last level"),
    (USAGE, ["spaces", "create", "a", "x/#", "--shards", "four"], "--shards 'four': give a whole number"),
    (USAGE, ["spaces", "create", "a", "x/#", "--retention", "7"], "duration '7': it has no unit. Say of what: 7s"),
    (USAGE, ["spaces", "create", "a", "a", "--payload-location", "file://rel"], "file:// and an absolute directory"),
    (USAGE, ["spaces", "create", "a", "a", "--payload-location", "s3://b/p"], "a bucket: 3 to 63 small letters"),
    (CONFLICT, ["spaces", "create", "default", "#", "--shards", "3"], "shards 16, retention_s none"),
    (USAGE, ["spaces", "reshard", "default", "0"], "shards 0: must be from 1"),
    (USAGE, ["spaces", "reshard", "default", "-5"], "'-5' is negative, and no argument"),
    (NOT_FOUND, ["spaces", "reshard", "nowhere", "4"], "space 'nowhere': there is no such space. There are"),
    (USAGE, ["leader", "--name", ""], "--name '': a node is named with 1 to 63 printable characters"),
    (USAGE, ["leader", "--name", "n" * 64], "a node is named with 1 to 63 printable characters"),
    (USAGE, ["leader", "--name", "n" * 63, "--listen", "7411"], "give HOST:PORT"),
    (USAGE, ["spaces", "list", "--database-url", "postgresql://x/y", "--data-dir", "/tmp/x"], "Give one of them"),
]


@pytest.mark.conforms("A9", "E24")
def test_what_cannot_work_is_refused_with_the_reason(shell: Shell) -> None:
    for code, arguments, reported in REFUSED:
        refused(shell.run(*arguments), code, reported)
    answer = shell.run("publish", "a/+", "--debug")
    assert (answer.code, "Traceback" in answer.err) == (USAGE, True), "that shows where"


def test_control_characters_are_refused_and_escaped(shell: Shell, database: str) -> None:
    for text in ("$share/evil\x1b]0;P\a/a", "$share/g/a\x1b[2J"):
        refused(shell.run("groups", "create", text), USAGE, "no control characters", "\\x1b")
    stored = Subscription("share", "evil\x1b]0;P\a", TopicFilter("a"))
    create_group(database, stored, GroupOptions())
    assert shell.run("groups", "pause", "$share/evil\\x1b]0;P\\x07/a").code == 0
    for command in (["groups", "list"], ["doctor"]):
        answer = shell.run(*command)
        assert "$share/evil\\x1b]0;P\\x07/a" in answer.out
        assert not any(control in answer.out for control in "\x1b\a")


def test_a_group_may_be_named_as_it_is_printed(shell: Shell, database: str) -> None:
    printed = "$share/evil\\x1b]0;P\\x07/a"
    names = ("evil\x1b]0;P\a", "evil\\x1b]0;P\\x07")
    stored, literal = (Subscription("share", name, TopicFilter("a")) for name in names)
    group, _ = create_group(database, stored, GroupOptions())
    for command in (["pause"], ["history"], ["describe"], ["reset", "--to-latest", "--dry-run"], ["export"]):
        found = shell.run("groups", command[0], printed, *command[1:], *([] if command == ["export"] else ["--json"]))
        assert found.object["subscription"] == str(stored), command
    reported = shell.run("groups", "why", printed)
    assert (reported.code, printed in reported.out, "\x1b" in reported.out) == (0, True, False)
    assert shell.run("groups", "clone", printed, "$share/good/a").code == 0
    other, _ = create_group(database, literal, GroupOptions())
    for wanted in (other, group):
        assert shell.run("groups", "delete", printed, "--yes", "--json").object["group_id"] == wanted.group_id
    refused(shell.run("groups", "delete", printed, "--yes"), NOT_FOUND, "there is no such group")


@pytest.mark.conforms("A9")
@pytest.mark.long
def test_a_consumer_joins_the_group_that_was_printed(shell: Shell, database: str) -> None:
    printed, literal = "$share/a\\u202eb/#", "$share/c\\u202ed/#"
    group = Subscription("share", "a\u202eb", TopicFilter("#"))
    create_group(database, group, GroupOptions(StartingPosition.EARLIEST))
    shell.leader("n1")
    shell.run("publish", "t", stdin="x\n")
    for given in (printed, literal):
        assert shell.run("consume", given, "--from", "earliest", "--max-messages", "1").out == "t\t\tx\n"
    listed = shell.run("groups", "list", "--json").object["groups"]
    assert {group["subscription"] for group in listed} == {"$share/a\u202eb/#", literal}
    through_node = shell.run("consume", printed, "--node", "127.0.0.1:1")
    refused(through_node, USAGE, "nodes cannot be asked which group", "consume without --node")


@pytest.mark.parametrize(
    ("layout", "record", "reported"),
    [
        ("lines", "x" * (1 << 20), "line 2 takes 1048609 bytes and the limit is 1048576. Publish a reference to where"),
        ("ndjson", f'{{"value":"{"x" * (1 << 20)}"}}', "line 2 takes 1048609 bytes and the limit is 1048576."),
        ("ndjson", '{"value":"two","topic":"t/#"}', "line 2: topic 't/#'"),
        ("ndjson", '{"value":"two","topic":"$SYS/t"}', "line 2: topic '$SYS/t'"),
    ],
    ids=["long line", "long value", "wildcard", "reserved"],
)
def test_a_bad_record_is_named_by_its_line(shell: Shell, layout: str, record: str, reported: str) -> None:
    """What came before it is durable."""
    first, last = ("one", "three") if layout == "lines" else ('{"value":"one"}', '{"value":"three"}')
    answer = shell.run("publish", "a", "--format", layout, "--json", stdin=f"{first}\n{record}\n{last}")
    assert (answer.code, reported in answer.err) == (USAGE, True), answer.err
    assert answer.object["durable"] == 1
    assert shell.run("tail", "#", "--from", "earliest", "--no-follow").out == "a\t\tone\n"


@pytest.mark.conforms("X3")
@pytest.mark.long
def test_a_wrong_url_is_shown_without_its_password() -> None:
    with a_shell() as shell:
        for url, code, reported in (
            ("postgresql://me:s3cret-pw@127.0.0.1:1/x", UNAVAILABLE, "cannot connect to me@127.0.0.1:1/x"),
            ("postgresql://me:s3cret-pw@127.0.0.1:port/x", USAGE, "is malformed"),
            ("postgresql://me:s3cret-pw@no.such.host.invalid/x", UNAVAILABLE, "Correct the host"),
        ):  # fmt: skip
            for command in (["groups", "list", "--debug"], ["publish", "a"], ["leader", "--migrate"]):
                shell.environment["SUBLET_DATABASE_URL"] = url
                answer = shell.run(*command)
                assert (answer.code, reported in answer.err) == (code, True), answer.err
                assert "s3cret-pw" not in answer.err + answer.out


@pytest.mark.conforms("X3")
def test_a_url_with_password_is_no_option() -> None:
    with a_shell() as shell:
        for url in ("postgresql://me:s3cret-pw@db/x", "host=db sslpassword=s3cret-pw"):
            answer = shell.run("groups", "list", "--database-url", url)
            assert (answer.code, "SUBLET_DATABASE_URL_FILE" in answer.err) == (USAGE, True), answer.err
            assert "s3cret-pw" not in answer.err + answer.out


@pytest.mark.long
def test_a_given_database_is_not_migrated_unasked(empty_database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=empty_database) as shell:
        for command in (["publish", "a"], ["leader", "--listen", "127.0.0.1:0"], ["groups", "list"]):
            refused(shell.run(*command), CONFLICT, "has no sublet tables", "Run `sublet migrate`")
        assert shell.run("migrate", "--json").object == {"schema": "sublet", "from": None, "to": SCHEMA_VERSION}
        assert shell.run("publish", "a", stdin="x").code == 0
        for version, reported in (("0003", "Make it anew"), ("9999", "newer than this program")):
            with connect(empty_database) as conn:
                conn.execute("update alembic_version set version_num = %s, compatible_from = null", (version,))
            refused(shell.run("tail", "#"), CONFLICT, f"is at version {version}", reported)
        refused(shell.run("migrate"), CONFLICT, "Upgrade sublet here")


def test_leader_migrates_when_it_is_asked_to(empty_database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=empty_database) as shell:
        shell.leader("n1", "--migrate")
        assert shell.run("groups", "list", "--json").object == {"groups": []}


@pytest.mark.long
def test_a_second_node_of_a_name_waits_for_the_lease(shell: Shell, database: str) -> None:
    first = shell.leader("n1")
    answer = shell.run("leader", "--name", "n1", "--listen", "127.0.0.1:0")
    refused(answer, CONFLICT, "Waiting for its lease to end", "choose another --name")
    first.process.kill()
    with connect(database) as conn:  # a second one may take a while to start
        conn.execute("update node set expires_at = clock_timestamp() + interval '15 s'")
    second = shell.leader("n1")
    second.says("Waiting for its lease to end")
    assert second.ask(signal.SIGTERM).code == 0


def test_another_protocol_version_is_refused(shell: Shell, database: str) -> None:
    with connect(database) as conn:
        register(conn, NodeIncarnation("n9", "i", "127.0.0.1:1"), 60, PROTOCOL_VERSION + 1)
    versions = (f"protocol version {PROTOCOL_VERSION}", str(PROTOCOL_VERSION + 1), "same release")
    refused(shell.run("consume", "$share/g/#"), CONFLICT, *versions)


def test_the_demo_needs_an_empty_directory(tmp_path: Path) -> None:
    """Another is refused before anything starts."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "old" / "records").mkdir(parents=True)
    (tmp_path / "old" / "postgres").mkdir()
    with a_shell() as shell:
        for given, reported in (
            ("old", f"--keep '{tmp_path}/old': it holds postgres, records"),
            ("file", f"--keep '{tmp_path}/file': File exists"),
            ("file/below", f"--keep '{tmp_path}/file/below': Not a directory"),
        ):
            refused(shell.run("demo", "--json", "--keep", str(tmp_path / given)), USAGE, reported, "Name ")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "old", "postgres", "records"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_data_directory_without_a_name_is_refused(tmp_path: Path) -> None:
    with a_shell(PYTHONPATH=source_path(REPOSITORY)) as shell:
        shell.directory = tmp_path
        refused(shell.run("spaces", "list", "--data-dir", ""), USAGE, "--data-dir", "it names no directory")
    assert not list(tmp_path.iterdir())


@pytest.mark.conforms("X2")
def test_a_node_listens_beyond_loopback_only_if_asked(shell: Shell) -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        answer = shell.run("leader", "--name", "n1", "--listen", address)
        refused(answer, USAGE, f"address '{address}' can be reached from other machines", "--insecure")
    node = shell.start("leader", "--name", "n1", "--listen", "0.0.0.0:0", "--insecure")
    node.says("serves on 0.0.0.0:")


@pytest.mark.conforms("E2")
def test_a_queue_is_declared_before_it_is_consumed(shell: Shell) -> None:
    shell.leader("n1")
    queue = "$queue/mail/out/#"
    refused(shell.run("consume", queue), NOT_FOUND, f"{queue}: a queue", f"sublet groups create '{queue}'")
    assert shell.run("groups", "create", queue).code == 0
    assert shell.run("groups", "create", queue).code == 0
    assert shell.run("publish", "out/1", stdin="kept\n").code == 0
    answer = shell.run("consume", queue, "--max-messages", "1", "--json")
    assert (answer.code, answer.object["value"]) == (0, "kept")


@pytest.mark.parametrize("given", [signal.SIGINT, signal.SIGTERM])
def test_a_follower_ends_cleanly_when_asked(shell: Shell, given: signal.Signals) -> None:
    shell.run("publish", "a", stdin="x\n")
    following = shell.start("tail", "#", "--from", "earliest")
    following.says("x")
    answer = following.ask(given)
    assert (answer.code, answer.err) == (128 + given, "")


IN_THE_MIDST = """
import os, signal, sys
import psycopg

def in_the_midst(connection, request):
    try:
        state = next(request)
    except StopIteration as done:
        return done.value
    if connection.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE and connection._num_transactions:
        stopped.append(1)
        if len(stopped) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    try:
        while True:
            state = request.send((yield state))
    except StopIteration as done:
        return done.value

stopped, wait = [], psycopg.Connection.wait
psycopg.Connection.wait = lambda self, request, *more, **named: wait(self, in_the_midst(self, request), *more, **named)
sys.argv[0] = "sublet"
from sublet.cli import main
main()
"""
"""The command line, that gets SIGTERM while a request is under way in a transaction."""


def test_a_follower_may_be_ended_while_it_reads(shell: Shell) -> None:
    answer = shell.start("tail", "#", "--from", "earliest", program=IN_THE_MIDST).end()
    assert (answer.code, answer.err) == (128 + signal.SIGTERM, "")


AT_THE_END = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.{name}))
sys.argv[0] = "sublet"
from sublet.cli import main
main()
"""
"""The command line, that gets a signal when the command is over and the process ends."""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_at_exit_is_no_traceback(shell: Shell, name: str) -> None:
    answer = shell.start("publish", "a/+", program=AT_THE_END.format(name=name)).end()
    assert (answer.code, "Traceback" in answer.err) == (-signal.Signals[name], False)


@pytest.mark.long
def test_a_consumer_without_a_leader_reports_it(shell: Shell) -> None:
    consumer = shell.start("consume", "$share/g/#")
    consumer.says("start one with `sublet leader`")
    answer = consumer.ask(signal.SIGINT)
    assert answer.code == 130
    assert "0 messages consumed" in answer.err


class ConsumerWithoutDatabase(CliCommandContext):
    """A command that cannot connect to its database after its first poll, and can again after its third; what it prints
    first interrupts it."""

    def __init__(self, url: str, server_url: str) -> None:
        super().__init__(url, None, json=False, debug=False)
        self.printed: list[str] = []
        self._polls, self._name, self._server_url = 0, conninfo_to_dict(url)["dbname"], server_url

    def wait_for_reader_to_leave(self, timeout_s: float = 0.0) -> None:
        self._polls += 1
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(f"alter database {self._name} allow_connections {self._polls >= 3}")

    def print_info(self, text: str) -> None:
        if not self.printed:
            signal.raise_signal(signal.SIGINT)
        self.printed.append(text)


def test_a_waiting_consumer_outlasts_a_restart(database: str, server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says why it waits when it can find out."""
    monkeypatch.setattr(consume, "LEADER_TIMEOUT_S", 0.0)
    cli = ConsumerWithoutDatabase(database, server_url)
    assert consume.consume(cli, "$share/g/#") == 130
    assert "start one with `sublet leader`" in cli.printed[0]


@pytest.mark.conforms("E30", "A9")
@pytest.mark.long
def test_of_two_consumers_of_a_name_the_older_ends(shell: Shell) -> None:
    shell.leader("n1")
    older = shell.start("consume", "$share/g/#", "--name", "etl")
    described = ("groups", "describe", "$share/g/#", "--json")
    eventually(lambda: (answer := shell.run(*described)).code == 0 and answer.object["members"], 60)
    newer = shell.start("consume", "$share/g/#", "--name", "etl")
    answer = older.end()
    assert (answer.code, answer.out) == (CONFLICT, ""), answer.err
    assert "fenced" in answer.err
    assert newer.ask(signal.SIGINT).code == 130


@pytest.mark.conforms("A9")
def test_a_taken_port_is_refused_in_one_sentence(shell: Shell) -> None:
    node = shell.leader("n1", "--json")
    address = node.out.split()[-1].rstrip('"}')
    answer = shell.run("leader", "--name", "n2", "--listen", address)
    refused(answer, USAGE, f"cannot listen on {address}", "`sublet leader --name n2 --listen 127.0.0.1:7412`")
    assert answer.err.startswith("sublet: "), answer.err
    assert len(answer.err.splitlines()) == 1, answer.err


@pytest.mark.conforms("A9")
def test_under_json_nothing_is_asked(shell: Shell) -> None:
    """And an error is an object on stderr."""
    assert shell.run("groups", "create", "$share/g/#").code == 0
    assert shell.run("spaces", "create", "us", "us/#").code == 0
    for command in ("groups reset $share/g/# --to-earliest", "groups delete $share/g/#", "spaces drop us"):
        answer = shell.run(*command.split(), "--json", stdin="y\n")
        refused(answer, USAGE, "Nothing was ", "Give --yes.")
        reported = json.loads(answer.err)
        assert reported == {"error": reported["error"], "exit_code": USAGE}
        assert done(shell.run(*command.split(), "--json", "--yes"))


def test_a_group_that_no_node_creates_is_named(shell: Shell, database: str) -> None:
    shell.leader("n1")
    with connect(database, idle_in_transaction_timeout_s=60) as connection, connection.transaction():
        connection.execute("lock table space in access exclusive mode")
        answer = shell.run("consume", GROUP, "--idle-timeout", "3s")
    refused(answer, UNAVAILABLE, "No node has created the group yet", "`sublet groups create '$share/g/#'`")


@pytest.mark.conforms("A8")
def test_a_read_only_database_takes_no_messages(shell: Shell, database: str) -> None:
    """Which is said at once: a publisher would wait for two minutes."""
    with connect(database) as conn:
        conn.execute(f"alter database {conn.info.dbname} set default_transaction_read_only = on")
    answer = shell.run("publish", "a", stdin="x\n")
    refused(
        answer, UNAVAILABLE, "default_transaction_read_only is on, set by database", "Turn it off", "alter database"
    )
    assert "may be there" not in answer.err


@pytest.mark.conforms("A8")
def test_what_is_certainly_not_stored_is_reported_so(shell: Shell, database: str) -> None:
    with connect(database) as conn:
        conn.execute("alter table block add check (codec is null)")
    refused(shell.run("publish", "a", stdin="x\ny\n"), 1, "0 messages are durable", "2 are not stored.\n")


def test_a_user_who_may_not_migrate_is_named(shell: Shell, database: str) -> None:
    """Whether the schema is there, or not."""
    with connect(database) as connection:
        connection.execute("create role outsider login")
    try:
        shell.environment["SUBLET_DATABASE_URL"] = make_conninfo(database, user="outsider")
        for schema in ("sublet", "other"):
            shell.environment["SUBLET_SCHEMA"] = schema
            refused(shell.run("migrate"), CONFLICT, f"schema {schema!r}: user 'outsider' may not change it (")
        shell.environment["SUBLET_SCHEMA"] = "sublet"
        with connect(database) as connection:
            connection.execute("grant usage, create on schema sublet to outsider")
            connection.execute("grant select on alembic_version, node to outsider")
        refused(shell.run("migrate", "--to", "0101", "--downgrade"), CONFLICT, "may not change it (must be owner of ")
    finally:
        with connect(database) as connection:
            connection.execute("drop owned by outsider")
            connection.execute("drop role outsider")


@pytest.mark.conforms("A9")
def test_a_closed_stdout_is_noticed_first(shell: Shell) -> None:
    command = shlex.join(shell.argv("groups", "create", "$share/g/#"))
    reported = subprocess.run(
        ["sh", "-c", f"{command} >&-"], cwd=REPOSITORY, env=shell.environment, stderr=subprocess.PIPE, check=False
    )
    assert (reported.returncode, b"stdout is closed" in reported.stderr) == (USAGE, True), reported.stderr
    assert shell.run("groups", "list", "--json").object == {"groups": []}


@pytest.mark.conforms("A9")
def test_a_closed_stdin_is_named(shell: Shell, tmp_path: Path) -> None:
    """A file is published without it."""
    messages = private_file(tmp_path / "messages", "1\n2\n")
    command = shlex.join(shell.argv("publish", "a"))
    shown = [
        subprocess.run(
            ["sh", "-c", f"{command} {options} <&-"],
            cwd=REPOSITORY,
            env=shell.environment,
            capture_output=True,
            check=False,
        )
        for options in ("", f"--json --file {messages}")
    ]
    assert (shown[0].returncode, b"stdin is closed" in shown[0].stderr) == (USAGE, True), shown[0].stderr
    assert json.loads(shown[1].stdout)["durable"] == 2


def test_missing_libraries_are_named() -> None:
    with a_shell() as shell:
        program = "import sys; sys.modules['typer'] = None\nfrom sublet.cli import main\nmain()"
        answer = shell.start("groups", "list", program=program).end()
        assert (answer.code, "pip install 'sublet[leader]'" in answer.err) == (1, True)


@pytest.mark.parametrize(
    ("code", "arguments", "reported"),
    [
        (UNAVAILABLE, [], "cannot connect"),
        (USAGE, ["--http", "0.0.0.0:0"], "--insecure"),
        (USAGE, ["--name", "a b"], "--name 'a b'"),
        (UNAVAILABLE, ["--debug"], "cannot connect"),
    ],
)
def test_what_ends_a_node_is_in_its_json_log(code: int, arguments: list[str], reported: str) -> None:
    with a_shell(SUBLET_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none", SUBLET_LOG_FORMAT="json") as shell:
        ended = shell.run("leader", "--listen", "127.0.0.1:0", *arguments)
    assert ended.code == code
    last = [json.loads(line) for line in ended.err.splitlines()][-1]
    assert (last["level"], reported in last["message"]) == ("critical", True)
    assert ("traceback" in last) is ("--debug" in arguments)
