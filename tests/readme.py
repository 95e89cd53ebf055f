"""The programs in README.md and other pages, as printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tools.source_path import source_path

ROOT = Path(__file__).parent.parent


def programs(page: str = "README.md") -> list[str]:
    """Its blocks of Python, in their order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def environment(url: str) -> dict[str, str]:
    """What somebody has who installed sublet and has set SUBLET_DATABASE_URL; output comes at once."""
    ours = {"PYTHONPATH": source_path(ROOT), "PYTHONUNBUFFERED": "1", "SUBLET_DATABASE_URL": url}
    return {name: text for name, text in os.environ.items() if not name.startswith("SUBLET_")} | ours
