"""The page of dependencies has all that an installation brings, with the bounds that it has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOR_WORK_ON_SUBLET = {"demo", "bench", "docs", "dev"}


def test_every_runtime_dependency_is_on_the_page_with_its_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [found for extra, found in project["optional-dependencies"].items() if extra not in FOR_WORK_ON_SUBLET]
    needed = {each for found in (project["dependencies"], *extras) for each in found}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    shown = {"".join(row) for row in re.findall(r"^\|(?: `\w+` \|)? `([\w\[\]-]+)` \| ([<>=.,\d]+) \|", page, re.M)}
    assert shown == needed
