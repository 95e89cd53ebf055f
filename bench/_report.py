"""What every bench shares: repeated rounds, medians and ratios, a JSON file and a page."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


@dataclass
class Series:
    """Messages per second of each contender in each round; a round is one entry of every list."""

    rates: dict[str, list[float]] = field(default_factory=dict)

    def add(self, contender: str, messages: int, seconds: float) -> None:
        """One round of one contender."""
        self.rates.setdefault(contender, []).append(messages / seconds)

    def median(self, contender: str) -> float:
        """Messages per second."""
        return statistics.median(self.rates[contender])

    def ratio(self, contender: str, to: str) -> tuple[float, float, float]:
        """(median, lowest, highest) of the ratios round by round: the machine's moods cancel out."""
        ratios = [a / b for a, b in zip(self.rates[contender], self.rates[to], strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


@dataclass(frozen=True)
class Claim:
    """A ratio that shall hold, or is only shown."""

    what: str
    contender: str
    to: str
    at_least: float | None

    def judged(self, series: Series) -> dict[str, Any]:
        """The measured ratio and whether it holds."""
        median, lowest, highest = series.ratio(self.contender, self.to)
        return {
            "what": self.what,
            "ratio": round(median, 2),
            "lowest": round(lowest, 2),
            "highest": round(highest, 2),
            "target": self.at_least,
            "holds": None if self.at_least is None else median >= self.at_least,
        }


def machine() -> dict[str, Any]:
    """What ran it, as far as the figures depend on it."""
    return {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}


def write(name: str, settings: dict[str, Any], series: Series, claims: Sequence[Claim], json_path: Path | None) -> str:
    """Write the JSON and the page's section; return the section."""
    judged = [claim.judged(series) for claim in claims]
    rates = {contender: round(series.median(contender)) for contender in series.rates}
    result = {"bench": name, "settings": settings, "machine": machine(), "messages_per_s": rates, "claims": judged}
    path = json_path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return _section(result)


def _section(result: dict[str, Any]) -> str:
    lines = ["| ratio | measured | lowest - highest | target | |", "| --- | --- | --- | --- | --- |"]
    for claim in result["claims"]:
        verdict = {None: "", True: "holds", False: "**missed**"}[claim["holds"]]
        target = "" if claim["target"] is None else claim["target"]
        spread = f"{claim['lowest']} - {claim['highest']}"
        lines.append(f"| {claim['what']} | {claim['ratio']} | {spread} | {target} | {verdict} |")
    lines += ["", "| | messages/s, median |", "| --- | --- |"]
    lines += [f"| {contender} | {rate:,} |" for contender, rate in result["messages_per_s"].items()]
    return "\n".join(lines) + "\n"


def page(path: Path, title: str, prose: str, section: str) -> None:
    """Write a page of the documentation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n{prose}\n\n{section}")
