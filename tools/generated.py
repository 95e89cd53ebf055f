"""Shared command of the page generators: writes pages, or checks with `--check` that they are current."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path


def write_or_check(
    description: str | None, texts: Mapping[Path, str | None], tool: str, arguments: list[str] | None = None
) -> int:
    """Write or check the files; return 1 if a file was to be checked and differs. A text of None means that the file
    must not exist."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args(arguments).check
    stale = {path: text for path, text in texts.items() if (path.read_text() if path.exists() else None) != text}
    for path, text in stale.items():
        if is_check:
            print(f"docs/{path.name} is stale: run python -m tools.{tool}")
        elif text is None:
            path.unlink()
        else:
            path.write_text(text)
    return int(is_check and bool(stale))
