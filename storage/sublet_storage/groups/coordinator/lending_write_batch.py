"""Collects the rows that a transaction will write, and writes them in few statements."""

from __future__ import annotations

from msgspec import Struct, field

from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.coordinator import lending_statements
from sublet_storage.groups.model.history_record_builder import to_history_record
from sublet_storage.groups.model.lending_row import LendingRow, LendingTransitionResult
from sublet_storage.groups.model.records import HistoryRecord


class LendingWriteBatch(Struct):
    """Rows to be written, all at the time `now_us`, each as its last transition leaves it. `history_by_group`: the
    history records written so far, by group."""

    now_us: int
    row_updates: dict[lending_statements.Key, tuple[LendingRow, int]] = field(default_factory=dict)
    history: list[HistoryRecord] = field(default_factory=list)
    history_by_group: dict[int, list[HistoryRecord]] = field(default_factory=dict)
    has_written: bool = False

    def add(self, former_row: LendingRow, transition: LendingTransitionResult, term: int) -> None:
        """Add the row and the history record of a transition."""
        if transition.event:
            self.history.append(to_history_record(transition.row, transition.event, term, self.now_us))
        if transition.row != former_row:
            self.row_updates[transition.row.group_id, transition.row.stream_id] = (transition.row, term)

    def flush(self, connection: Connection) -> None:
        """Queue the statements, and empty the batch."""
        self.has_written = self.has_written or bool(self.row_updates or self.history)
        lending_statements.update_rows(connection, tuple(self.row_updates.values()), self.now_us)
        lending_statements.write_history(connection, self.history, self.now_us)
        for record in self.history:
            self.history_by_group.setdefault(record.group_id, []).append(record)
        self.row_updates.clear()
        self.history.clear()
