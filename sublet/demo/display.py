"""Prints the demo: progress while it runs, tables at its end; prose goes to stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from sublet.demo.delivery_check import KILLS_BETWEEN, DeliveryCheckResult

_PLAIN_INTERVAL_S = 5.0


class DemoDisplay:
    """Shows progress: bars on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.console = _make_console(stderr=True)
        self._began = time.monotonic()
        self._printed_at = self._began
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    @property
    def seconds(self) -> float:
        """Return the seconds since the demo began."""
        return time.monotonic() - self._began

    def print_line(self, text: str) -> None:
        """Print a line with the time."""
        self.console.print(f"[dim]{self.seconds:6.1f} s[/dim]  {text}")

    @contextmanager
    def show_bars(self, total: int) -> Iterator[None]:
        """Show bars of `published` and `consumed` while inside."""
        columns = (
            TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._bars = {name: progress.add_task(name, total=total) for name in ("published", "consumed")}
            yield
        self._progress = None

    def update(self, published: int, consumed: int) -> None:
        """Update the counts of messages."""
        if self._progress is not None:
            self._progress.update(self._bars["published"], completed=published)
            self._progress.update(self._bars["consumed"], completed=consumed)
        if not self.console.is_terminal and time.monotonic() - self._printed_at > _PLAIN_INTERVAL_S:
            self._printed_at = time.monotonic()
            self.print_line(f"published {published:,}, consumed {consumed:,}")

    def print_result(
        self, findings: DeliveryCheckResult, holdings: Sequence[dict[str, Any]], moves: Sequence[dict[str, Any]]
    ) -> None:
        """Print the tables and the verdict."""
        out = _make_console(stderr=False)
        out.print(_make_holdings_table(holdings))
        out.print(_make_totals_table(findings))
        forced = sum(1 for holding in holdings if holding["forced"])
        out.print(
            f"published {findings.published:,}, consumed {findings.consumed:,}, [bold]lost {findings.lost:,}[/bold]; "
            f"{len(moves)} moves of a stream to another worker, {forced} of them forced; {self.seconds:.0f} s"
        )
        out.print(
            f"delivered twice: {findings.duplicated:,}, of which {findings.explained_duplicates:,} are explained by "
            "forced moves"
        )
        for repeat in findings.duplicate_ranges:
            out.print(_format_repeat(repeat))
        verdict = "[green]sound[/green]: nothing lost, every repeat explained, totals per carrier as in the file"
        out.print(verdict if findings.is_ok else f"[bold red]NOT SOUND[/bold red]: {_format_problems(findings)}")


def _make_console(stderr: bool) -> Console:
    """Return a console; elsewhere than on a terminal lines and tables are not wrapped."""
    if Console(stderr=stderr).is_terminal:
        return Console(stderr=stderr, highlight=False)
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=120)


def _format_repeat(repeat: dict[str, Any]) -> str:
    offsets = f"[{repeat['from']:,}, {repeat['to']:,})"
    text = f"  stream {repeat['stream_id']}: {repeat['messages']:,} messages in {offsets} again, "
    if repeat["explained"]:
        return text + "after a forced move: their worker died before it reported them"
    return text + "[bold red]and no forced move explains them[/bold red]"


def _format_problems(findings: DeliveryCheckResult) -> str:
    """Return the reasons why the result is not ok."""
    unexplained = findings.duplicated - findings.explained_duplicates
    carriers = [carrier for carrier, (published, consumed, _) in findings.totals.items() if published != consumed]
    min_share, max_share = KILLS_BETWEEN
    late = [
        f"the {kill.what} was killed when {kill.consumed_share:.1%} was consumed" for kill in findings.mistimed_kills
    ]
    problems = (
        (findings.lost, f"{findings.lost:,} messages are lost"),
        (unexplained, f"{unexplained:,} repeats are not explained"),
        (findings.misplaced, f"{findings.misplaced:,} messages are not where they were published"),
        (carriers, f"totals differ for {', '.join(carriers)}"),
        (late, f"{' and '.join(late)}, not between {min_share:.0%} and {max_share:.0%}"),
    )
    return "; ".join(problem for is_wrong, problem in problems if is_wrong)


def _make_holdings_table(holdings: Sequence[dict[str, Any]]) -> Table:
    table = Table("stream", "held by", "from", "until", "messages", "how it ended", title="Who held what, and when")
    for holding in holdings:
        end = "" if holding["until_s"] is None else f"{holding['until_s']:.1f} s"
        messages = f"[{holding['from_offset']:,}, {holding['to_offset']:,})"
        row = (
            str(holding["stream_id"]),
            holding["holder"],
            f"{holding['from_s']:.1f} s",
            end,
            messages,
            holding["ended"],
        )
        table.add_row(*row, style="yellow" if holding["forced"] else None)
    return table


def _make_totals_table(findings: DeliveryCheckResult) -> Table:
    table = Table("carrier", title="Totals per carrier")
    for name in ("in the file", "consumed", "miles"):
        table.add_column(name, justify="right")
    for carrier, (published, consumed, miles) in findings.totals.items():
        table.add_row(
            carrier, f"{published:,}", f"{consumed:,}", f"{miles:,}", style=None if published == consumed else "red"
        )
    return table
