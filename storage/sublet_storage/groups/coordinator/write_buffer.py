"""What a transaction is going to write, collected row by row and written in as few statements as there are kinds."""

from __future__ import annotations

from dataclasses import dataclass, field

from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator import lending_rows
from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.groups.model.transitions import Row, Ruling, record


@dataclass(slots=True)
class Pen:
    """`now_us` is the time of all that it writes. `recorded`: the lines of history that it wrote so far, by group."""

    now_us: int
    moved: list[tuple[Row, int]] = field(default_factory=list)
    changed: list[tuple[Row, int]] = field(default_factory=list)
    lines: list[HistoryRecord] = field(default_factory=list)
    recorded: dict[int, list[HistoryRecord]] = field(default_factory=dict)

    def note(self, before: Row, ruling: Ruling, term: int, *, moves: bool = False) -> None:
        """Take over a ruling. `moves`: unless there is an event, it changed the position, and nothing else but what is
        consumed in whole epochs, or in doubt."""
        if ruling.event:
            self.lines.append(record(ruling.row, ruling.event, term, self.now_us))
        if ruling.row != before:
            after = ruling.row
            same = after.consumed is before.consumed and after.in_doubt is before.in_doubt
            moves = moves and not ruling.event and same
            written = self.moved if moves else self.changed
            written.append((ruling.row, term))

    def write(self, connection: Connection) -> None:
        """Queue the statements, and begin again empty."""
        lending_rows.move(connection, self.moved, self.now_us)
        lending_rows.change(connection, self.changed, self.now_us)
        lending_rows.write_history(connection, self.lines, self.now_us)
        for line in self.lines:
            self.recorded.setdefault(line.group_id, []).append(line)
        for kind in (self.moved, self.changed, self.lines):
            kind.clear()
