"""A dump that is taken under load and restored elsewhere: who goes on there loses nothing, and no number repeats."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from sublet_storage.bootstrap.embedded.binaries import find_binaries
from sublet_storage.db.connect import check_schema, connect
from tests.deliveries import judge
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, eventually

DRAW = "select sublet.next_session_epoch('$share/g/#', 'etl')"


def run(program: str, *arguments: str) -> None:
    """One of the server's own version, as docs/backup.md says."""
    subprocess.run([find_binaries(Path("none"), None) / program, *arguments], check=True)


@pytest.mark.conforms("E13", "E29")
@pytest.mark.long
def test_a_group_goes_on_from_a_dump_taken_under_load(database: str, empty_database: str, tmp_path: Path) -> None:
    file = tmp_path / "backup.dump"
    for place in ("old", "new"):
        (tmp_path / place).mkdir()
    with closing(Stage(database, tmp_path / "old")) as old:
        old.serve("n1")
        old.share("a")
        with old.scene.load(every_s=0.1):
            old.more()
            run("pg_dump", "--schema=sublet", "--format=custom", f"--file={file}", database)
            old.more()  # what is published and consumed from here on is in no backup
        before, last_draw = old.scene.claim(), old.scene.ask(DRAW)[0][0]
        seen, ahead = old.fleet.delivered(), old.scene.heads()

    options = "--no-owner --no-privileges --exit-on-error --single-transaction"
    run("pg_restore", *options.split(), f"--dbname={empty_database}", str(file))
    with closing(Stage(empty_database, tmp_path / "new")) as new:
        with connect(empty_database) as conn:
            check_schema(conn)
        heads, positions = new.scene.heads(), {stream: position for stream, _, position, _ in new.scene.rows()}
        assert sum(heads.values()) < sum(ahead.values()), "the dump was taken too late to show anything"
        assert all(positions[stream] <= heads[stream] for stream in heads), "one instant"
        new.scene.publish(200)
        new.serve("n1")
        new.share("b")
        eventually(new.scene.consumed, WAIT_S, new.said)
        after = new.scene.claim()
        assert after.term > before.term, "a leader's term was used twice"
        assert new.scene.ask(DRAW)[0][0] > last_draw
        delivered = new.fleet.delivered()
        assert {each.grant for each in delivered}.isdisjoint({each.grant for each in seen}), "a grant was given twice"
        first = {stream: positions[stream] for stream in heads}
        begun = [offset for each in delivered for offset in each.offsets if offset < first[each.stream]]
        assert begun == [], "consumed before the backup was taken"
        published = new.scene.heads()
        assert judge(published, [*delivered, *(d for d in seen if d.offsets[0] < first[d.stream])], ()).lost == []
