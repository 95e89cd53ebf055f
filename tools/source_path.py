"""PYTHONPATH of a checkout that is not installed."""

from __future__ import annotations

import os
from pathlib import Path

FOLDERS = (".", "protocol", "storage", "leader", "borrower")


def source_path(root: Path) -> str:
    """Return a PYTHONPATH for the checkout at `root`."""
    return os.pathsep.join(str(root / folder) for folder in FOLDERS)
