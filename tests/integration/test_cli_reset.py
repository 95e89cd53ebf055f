"""Orders and resets of live groups from the command line: real processes, real sessions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions, StartingPosition
from tests.integration.cli_kit import Shell, a_shell, done, refused
from tests.integration.lending_kit import GROUP, SUBSCRIPTION, NumberConsumer, publish_numbers
from tests.kit import eventually
from tests.kit_nodes import Fleet


@pytest.fixture
def orders(database: str) -> str:
    """A group at the beginning of two hundred messages."""
    create_group(database, SUBSCRIPTION, GroupOptions(StartingPosition.EARLIEST))
    publish_numbers(database, range(200))
    return database


def held(url: str) -> int:
    with connect(url) as conn:
        return len(conn.execute("select from lending where status = 'held'").fetchall())


@pytest.mark.conforms("A5")
@pytest.mark.long
def test_a_paused_group_goes_on_where_it_was(shell: Shell, orders: str, fleet: Fleet) -> None:
    consumer = NumberConsumer(orders)
    with consumer.session:
        consumer.until(200)
        assert done(shell.run("groups", "pause", GROUP, "--reason", "repairs", "--json"))["changed"] is True
        eventually(lambda: consumer.read() or not held(orders), 60)
        publish_numbers(orders, range(200, 250))
        assert not consumer.read(1.0)
        described = shell.run("groups", "describe", GROUP).out
        assert "paused   repairs" in described
        assert f"group    {GROUP} (id 1), paused" in described
        assert done(shell.run("groups", "pause", GROUP, "--json"))["changed"] is False
        again = shell.run("groups", "pause", GROUP, "--reason", "lunch")
        assert again.err == f"{GROUP}: paused: repairs, as it was: nothing was changed.\n", (
            "the reason that is in force"
        )
        assert "paused" in shell.run("groups", "list").out
        waiting = shell.start("consume", GROUP, "--idle-timeout", "8s")
        waiting.says("The group is paused (repairs): `sublet groups resume '$share/billing/orders/#'`")
        assert waiting.end().code == 5
        assert done(shell.run("groups", "resume", GROUP, "--json"))["paused"] is None
        consumer.until(250)
    assert sorted(consumer.seen) == list(range(250))
    assert [word in shell.run("groups", "history", GROUP).out for word in ("paused: repairs", "resumed")] == [True] * 2


@pytest.mark.conforms("A5")
@pytest.mark.long
def test_a_reset_waits_for_members_to_hand_over(shell: Shell, orders: str, fleet: Fleet) -> None:
    consumer = NumberConsumer(orders, max_batch_bytes=1)
    with consumer.session:
        eventually(consumer.read, 60)
        resetting = shell.start("groups", "reset", GROUP, "--to-latest", "--yes")
        resetting.says("waiting for members to hand over")
        eventually(lambda: consumer.read() or not held(orders), 60)
        assert resetting.end().code == 0
        before = list(consumer.seen)
        assert len(before) < 200
        publish_numbers(orders, range(200, 220))
        consumer.until(len(before) + 20)
        assert not consumer.read(1.0)
    assert sorted(consumer.seen[len(before) :]) == list(range(200, 220))
    described = shell.run("groups", "describe", GROUP).out
    assert "paused   " not in described


@pytest.mark.conforms("A5")
def test_history_records_who_gave_a_command(shell: Shell, orders: str) -> None:
    with connect(orders) as conn:
        user = f"alice_{conn.info.dbname}"
        conn.execute(f"create role {user} login superuser")
        url = make_conninfo(orders, user=user)
        try:
            with a_shell(SUBLET_DATABASE_URL=url) as other:
                for command in (
                    ["pause", GROUP, "--reason", "repairs"], ["weight", GROUP, "s", "2"], ["resume", GROUP],
                    ["reset", GROUP, "--to-latest", "--yes"], ["clone", GROUP, GROUP.replace("billing", "copy")],
                ):  # fmt: skip
                    assert other.run("groups", *command).code == 0, command
            assert shell.run("groups", "pause", GROUP).code == 0
            lines = done(shell.run("groups", "history", GROUP, "--json"))["history"]
            reported = [line["reason"] for line in lines]
            by = f", by database user {user}"
            assert reported[:4] == [
                f"paused: repairs{by}", f"weight of session 's': 2{by}", f"resumed{by}",
                f"paused: to be reset to latest{by}",
            ]  # fmt: skip
            assert reported[-1] == f"paused, by database user {conn.info.user}"
            resets = {line["reason"] for line in lines if line["event"] == "reset"}
            assert resets == {f"reset to latest{by}; was at 0"}
            assert f"repairs{by}" in shell.run("groups", "history", GROUP).out
            assert f"group 1{by}" in shell.run("groups", "history", GROUP.replace("billing", "copy")).out
            conn.execute(
                "update lending set status = 'held', borrower_id = 'b', agent = 'a', grant_id = grant_id + 1"
                " where group_id = 1"
            )
            with a_shell(SUBLET_DATABASE_URL=url) as other:
                assert other.run("groups", "delete", GROUP, "--yes").code == 0
            ((ended,),) = conn.execute("select distinct reason from lending_history where event = 'delete'").fetchall()
            assert ended == f"its group was deleted{by}"
        finally:
            conn.execute(f"drop owned by {user}; drop role {user}")


@pytest.mark.conforms("A5")
@pytest.mark.long
def test_of_two_resets_at_once_the_second_is_refused(shell: Shell, orders: str, fleet: Fleet) -> None:
    consumer = NumberConsumer(orders, max_batch_bytes=1)
    with consumer.session, connect(orders) as conn:
        eventually(consumer.read, 60)
        first = shell.start("groups", "reset", GROUP, "--to-latest", "--yes")
        first.says("waiting for members to hand over")
        (holder,) = conn.execute("select pid from pg_stat_activity where application_name = 'sublet reset'").fetchall()
        for force in ([], ["--force"]):
            second = shell.run("groups", "reset", GROUP, "--to-earliest", "--yes", *force)
            assert (second.code, "Traceback" in second.err) == (4, False)
            for reported in ("is being reset already by database user", f"process {holder[0]} of", "reset to latest"):
                assert reported in second.err
        assert done(shell.run("groups", "reset", GROUP, "--to-earliest", "--dry-run", "--json"))["done"] is False
        other = GROUP.replace("billing", "other")
        assert shell.run("groups", "create", other).code == 0
        assert shell.run("groups", "reset", other, "--to-earliest", "--yes").code == 0
        assert "paused   to be reset to latest" in shell.run("groups", "describe", GROUP).out, "the first one's"
        eventually(lambda: consumer.read() or not held(orders), 60)
        assert first.end().code == 0
        assert "paused   " not in shell.run("groups", "describe", GROUP).out
        publish_numbers(orders, range(200, 300))
        eventually(consumer.read, 60)
        dying = shell.start("groups", "reset", GROUP, "--to-latest", "--yes")
        dying.says("waiting for members to hand over")
        dying.kill()
        eventually(lambda: consumer.read() or not held(orders), 60)
        eventually(lambda: shell.run("groups", "reset", GROUP, "--to-latest", "--yes").code == 0, 60)


@pytest.mark.conforms("A5")
def test_a_pause_of_another_user_outlives_the_reset(shell: Shell, orders: str) -> None:
    resetting = shell.start("groups", "reset", GROUP, "--to-latest", stdin=subprocess.PIPE)
    resetting.says("[y/N]")
    assert done(shell.run("groups", "pause", GROUP, "--reason", "mine", "--json"))["changed"] is True
    resetting.stdin.write(b"y\n")
    resetting.stdin.close()
    assert resetting.end().code == 0
    assert "paused   mine" in shell.run("groups", "describe", GROUP).out


@pytest.mark.conforms("A4")
def test_a_plan_and_an_export_can_be_gone_back_to(shell: Shell, orders: str, fleet: Fleet, tmp_path: Path) -> None:
    consumer = NumberConsumer(orders)
    with consumer.session:
        consumer.until(200)
        assert not consumer.read(1.0), "the last batch is acknowledged by that"
    exported = shell.run("groups", "export", GROUP)
    (tmp_path / "before.json").write_text(exported.out)
    planned = done(shell.run("groups", "reset", GROUP, "--to-earliest", "--dry-run", "--json"))
    assert planned["done"] is False
    answer = shell.run("groups", "reset", GROUP, "--to-epoch", "1", "--dry-run")
    assert "have no message in any epoch: all that they have is passed over." in answer.err
    assert "In all 0 messages again, and 0 skipped." in answer.err
    assert sum(each["before"] - each["after"] for each in planned["streams"]) == 200
    assert json.loads(shell.run("groups", "export", GROUP).out)["streams"] == exported.object["streams"]
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    assert shell.run("groups", "reset", GROUP, "--from-file", str(tmp_path / "plan.json"), "--yes").code == 0
    assert {each["position"] for each in shell.run("groups", "export", GROUP).object["streams"]} == {0}
    answer = shell.run("groups", "reset", GROUP, "--from-file", str(tmp_path / "before.json"), "--yes")
    assert "streams of $share/billing/orders/# go on from the offsets that were given" in answer.err
    assert shell.run("groups", "export", GROUP).object["streams"] == exported.object["streams"]


@pytest.mark.long
@pytest.mark.conforms("A4", "A9")
def test_what_cannot_be_reset_is_refused(shell: Shell, orders: str, tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text('{"streams": [{"stream": 1}]}')
    for options, reported in (
        ("--to-offset -1", "offset -1: an offset is a whole number from 0 to"),
        ("--to-offset 9223372036854775808", "offset 9223372036854775808: an offset is a whole number from 0 to"),
        ("--to-time 12", "--to-time '12': give a time"),
        ("--by-duration x", "duration 'x'"),
        ("--by-duration 9999999d", "longer than time is"),
        ("--to-epoch a,b", "--to-epoch 'a,b'"),
        (f"--from-file {tmp_path}/none.json", "No such file"),
        (f"--from-file {odd}", "Make one with `sublet groups export`"),
    ):
        refused(shell.run("groups", "reset", GROUP, *options.split()), 2, reported)
    stream = {"stream_id": 1, "position": 0}
    for changed, reported in (
        ({"streams": [{**stream, "position": 0.5}]}, "stream 1, position 0.5"),
        ({"streams": [{**stream, "position": "0"}]}, "stream 1, position '0'"),
        ({"streams": [{**stream, "position": True}]}, "stream 1, position True"),
        ({"streams": [stream, stream]}, "a stream occurs twice"),
        ({"subscription": "$share/other/orders/#"}, f"it is of $share/other/orders/#, not of {GROUP}"),
    ):
        odd.write_text(json.dumps({"subscription": GROUP, "streams": [stream], **changed}))
        refused(shell.run("groups", "reset", GROUP, "--from-file", str(odd), "--dry-run"), 2, reported)
    for looked in ("reset --to-earliest", "history", "why"):
        name, *flags = looked.split()
        refused(shell.run("groups", name, GROUP, *flags, "--stream", "999"), 3, "stream 999 is none of")
    refused(shell.run("groups", "reset", "$share/none/#", "--to-earliest"), 3, "there is no such group")
    refused(shell.run("groups", "pause", "$share/none/#"), 3, "there is no such group")
    refused(shell.run("groups", "weight", GROUP, "s", "much"), 2, "weight 'much': give a number")
    refused(shell.run("groups", "weight", GROUP, "s", "0"), 2, "weight 0.0: it is a number from 0.001")
    answer = shell.run("groups", "reset", GROUP, "--to-latest", stdin="n\n")
    assert answer.code == 1
    assert "Nothing was changed" in answer.err
    assert done(shell.run("groups", "weight", GROUP, "s", "2.5", "--json"))["weights"] == {"s": 2.5}
    assert "weights  s 2.5" in shell.run("groups", "describe", GROUP).out
    assert "No session 's' holds a stream at present" in shell.run("groups", "weight", GROUP, "s", "2").err
    assert done(shell.run("groups", "weight", GROUP, "s", "own", "--json"))["weights"] == {}


@pytest.mark.conforms("A5")
@pytest.mark.long
def test_a_reset_waits_for_an_absent_holder_or_forces(shell: Shell, orders: str, fleet: Fleet) -> None:
    consumer = NumberConsumer(orders)
    with consumer.session:
        eventually(consumer.read, 60)
        fleet.close()
        answer = shell.run("groups", "reset", GROUP, "--to-earliest", "--yes", "--timeout", "1s")
        assert answer.code == 4
        assert "are granted" in answer.err
        assert "A leader may take 5 s to read of the pause: wait for longer than 1 s." in answer.err
        assert "paused" not in shell.run("groups", "describe", GROUP).out, "it is as it was"
        assert shell.run("groups", "reset", GROUP, "--to-earliest", "--yes", "--force").code == 0
        assert held(orders) == 0
    assert "seen twice" in shell.run("groups", "describe", GROUP).out
