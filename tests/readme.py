"""The programs in README.md and other pages, as printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tools.source_path import source_path

ROOT = Path(__file__).parent.parent


def programs(page: str = "README.md") -> list[str]:
    """Return the blocks of Python of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def environment(url: str) -> dict[str, str]:
    """Return the environment of a user who installed sublet and set SUBLET_DATABASE_URL; output is not buffered."""
    ours = {"PYTHONPATH": source_path(ROOT), "PYTHONUNBUFFERED": "1", "SUBLET_DATABASE_URL": url}
    return {name: text for name, text in os.environ.items() if not name.startswith("SUBLET_")} | ours
