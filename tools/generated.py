"""The command of a tool that generates a page: it writes it, or with `--check` says whether it is current."""

from __future__ import annotations

import argparse
from pathlib import Path


def write_or_check(description: str | None, page: Path, text: str, tool: str, arguments: list[str] | None) -> int:
    """The exit code: 1 if the page was to be checked and differs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args(arguments).check:
        if not page.exists() or page.read_text() != text:
            print(f"docs/{page.name} is stale: run python -m tools.{tool}")
            return 1
        return 0
    page.write_text(text)
    return 0
