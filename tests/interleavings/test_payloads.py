"""Payloads on their way out of Postgres, against who reads, merges or drops them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sublet_protocol.domain.errors import PositionGone
from sublet_storage.spaces import retention, small_block_compaction, space_changes, tiering
from tests.integration.log_kit import read, stream_of
from tests.interleavings.harness import Connection, Interleavings, Run, in_transaction
from tests.payload_kit import LocalWorld, fill, move, outside


class Stage:
    """Space `eu`, with a place where something lies; two small blocks of a stream are due to go there."""

    def __init__(self, conn: Connection, world: LocalWorld) -> None:
        self.conn, self.world = conn, world
        self.space = space_changes.alter_space(conn, "eu", payload_location=world.uri, tier_after_s=1)
        fill(conn, stream_of(conn, "eu"), 1)
        space_changes.rollover(conn, "eu")
        move(conn, self.space)
        self.stream, self.objects = stream_of(conn, "eu"), world.names()
        fill(conn, self.stream, 2)
        conn.execute("update block set appended_at = appended_at - interval '1 hour'")
        self.before = read(conn, self.stream)

    def end(self) -> None:
        """Make the stream's generation due to be dropped completely."""
        space_changes.rollover(self.conn, "eu")
        self.conn.execute(
            "update generation g set closed_at = g.closed_at - interval '101 s'"
            " from stream s where s.generation_id = g.generation_id and s.stream_id = %s",
            (self.stream,),
        )

    def tier(self, conn: Connection) -> int:
        return tiering.tier_space(conn, self.space).blocks

    def read(self, conn: Connection) -> Any:
        return read(conn, self.stream)

    def compact(self, conn: Connection) -> int:
        return small_block_compaction.compact_stream(conn, self.stream, older_than_s=0)

    def drop(self, conn: Connection) -> list[int]:
        return retention.apply_retention(conn)

    def check_objects(self, conn: Connection) -> None:
        """What blocks name is there; of what else there is it is known that it must go."""
        there, named = {f"{self.world.uri}/{name}" for name in self.world.names()}, outside(conn)
        assert named <= there
        assert there - named <= {uri for (uri,) in conn.execute("select uri from payload_object")}


@pytest.fixture
def stage(conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(retention, "LOCK_TIMEOUT_S", 60.0)  # nobody gives up because the machine is slow
    return Stage(conn, LocalWorld(tmp_path))


KNOWING_THE_BLOCKS = {"tier": "insert into payload_object", "compact": "for update", "drop": "detach partition"}
"""Where each of them knows what is there, and has changed nothing yet."""


@pytest.mark.conforms("W5")
@pytest.mark.parametrize("act", ["read", "compact", "drop"])
def test_moving_payloads_changes_nothing_for_others(orders: Interleavings, stage: Stage, act: str) -> None:
    def judge(run: Run) -> None:
        assert not run.errors
        stage.check_objects(run.conn)
        assert run.answers.get("read", stage.before) == stage.before
        if act == "drop":
            with pytest.raises(PositionGone):
                stage.read(run.conn)
        else:
            assert stage.read(run.conn) == stage.before
        for name in stage.world.names() - stage.objects:  # as it was at the beginning
            stage.world.remove(name)

    if act == "drop":
        stage.end()
    participants = {"tier": stage.tier, act: getattr(stage, act)}
    ahead = {who: text for who, text in KNOWING_THE_BLOCKS.items() if who in participants}
    orders.explore(participants, judge, ahead)


@pytest.mark.conforms("W5")
def test_a_move_locks_blocks_as_a_merge_does(orders: Interleavings, stage: Stage) -> None:
    """In the order of their offsets, wherever their rows lie: here no index leads to them."""
    ((first, last),) = stage.conn.execute(
        "select min(end_offset), max(end_offset) from block where stream_id = %s", (stage.stream,)
    ).fetchall()
    move_behind = "update block set count = count where stream_id = %s and end_offset = %s"
    stage.conn.execute(move_behind, (stage.stream, first))
    stage.conn.execute("alter table block drop constraint block_pkey")

    @in_transaction
    def hold(conn: Connection) -> None:
        held = "select from block where stream_id = %s and end_offset = %s for update"
        conn.execute(held, (stage.stream, last))

    def judge(run: Run) -> None:
        assert not run.errors
        for name in stage.world.names() - stage.objects:
            stage.world.remove(name)

    ahead = {"hold": "end of transaction", "tier": "select from block where", "compact": KNOWING_THE_BLOCKS["compact"]}
    orders.explore({"tier": stage.tier, "compact": stage.compact, "hold": hold}, judge, ahead)


@pytest.mark.conforms("W5")
def test_what_a_dropped_partition_names_is_orphaned(orders: Interleavings, stage: Stage) -> None:
    """Whoever has a transaction open on it lets its last block name what it was registered for."""
    uri = f"{stage.world.uri}/late"

    @in_transaction
    def name(conn: Connection) -> None:
        conn.execute("delete from payload_object where uri = %s", (uri,))
        conn.execute(f"update block_{generation} set payload = null, uri = %s where end_offset = 4", (uri,))

    def judge(run: Run) -> None:
        assert run.answers["drop"] or retention.drop_gone(run.conn), "the next pass drops what was locked"
        assert run.conn.execute("select from payload_object where uri = %s", (uri,)).rowcount == 1

    stage.end()
    (generation,) = retention.mark_expired_gone(stage.conn)
    stage.conn.execute(
        "insert into payload_object (uri, space_id, generation_id, stream_id, end_offset) values (%s, %s, %s, %s, 4)",
        (uri, stage.space.space_id, generation, stage.stream),
    )
    orders.explore({"drop": retention.drop_gone, "name": name}, judge)
