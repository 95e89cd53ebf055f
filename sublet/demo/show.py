"""What one sees of the demo: bars and lines while it runs, tables at its end. Prose goes to standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from sublet.demo.check import Findings

_PLAIN_EVERY_S = 5.0


class Show:
    """Bars on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._began = time.monotonic()
        self._said_at = 0.0
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    @property
    def seconds(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """A line with the time."""
        self.console.print(f"[dim]{self.seconds:6.1f} s[/dim]  {text}")

    @contextmanager
    def bars(self, total: int) -> Iterator[None]:
        """Show `published` and `consumed` while inside."""
        columns = (
            TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._bars = {name: progress.add_task(name, total=total) for name in ("published", "consumed")}
            yield
        self._progress = None

    def update(self, published: int, consumed: int) -> None:
        """How far it is."""
        if self._progress is not None:
            self._progress.update(self._bars["published"], completed=published)
            self._progress.update(self._bars["consumed"], completed=consumed)
        if not self.console.is_terminal and self.seconds - self._said_at > _PLAIN_EVERY_S:
            self._said_at = self.seconds
            self.say(f"published {published:,}, consumed {consumed:,}")

    def end(self, findings: Findings, holdings: Sequence[dict[str, Any]], moves: Sequence[dict[str, Any]]) -> None:
        """The tables."""
        out = Console(highlight=False)
        out.print(_holdings(holdings))
        out.print(_totals(findings))
        repeats = f"{findings.duplicated:,} delivered twice, {findings.explained_duplicates:,} of them explained"
        out.print(
            f"published {findings.published:,}   consumed {findings.consumed:,}   "
            f"[bold]lost {findings.lost:,}[/bold]   {repeats}   moves {len(moves)}   {self.seconds:.0f} s"
        )
        for one in findings.duplicate_ranges:
            out.print(
                f"  stream {one['stream']}: {one['messages']} messages in [{one['from']}, {one['to']}) were delivered "
                f"again after a forced move{'' if one['explained'] else ' [bold red]that explains nothing[/bold red]'}"
            )
        verdict = "[green]sound[/green]: nothing lost, every repeat explained, totals as in the file"
        out.print(verdict if findings.sound else "[bold red]NOT SOUND[/bold red]: see above")


def _holdings(holdings: Sequence[dict[str, Any]]) -> Table:
    table = Table("stream", "held by", "from", "until", "messages", "how it ended", title="Who held what, and when")
    for one in holdings:
        until = "" if one["until_s"] is None else f"{one['until_s']:.1f} s"
        messages = f"[{one['from_offset']:,}, {one['to_offset']:,})"
        row = (str(one["stream"]), one["holder"], f"{one['from_s']:.1f} s", until, messages, one["ended"])
        table.add_row(*row, style="yellow" if one["forced"] else None)
    return table


def _totals(findings: Findings) -> Table:
    table = Table("carrier", title="Totals per carrier")
    for name in ("in the file", "consumed", "miles"):
        table.add_column(name, justify="right")
    for carrier, (wanted, found, miles) in findings.totals.items():
        table.add_row(carrier, f"{wanted:,}", f"{found:,}", f"{miles:,}", style=None if wanted == found else "red")
    return table
