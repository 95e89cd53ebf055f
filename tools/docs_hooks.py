"""Hooks of mkdocs (`make docs`): pages from outside docs/, and links to files of the repository.

Pages are written to be read in the repository and link to files by their paths. A link to a file that is also a page of
the site becomes a link to that page; of any other link, for example to a module, only its text is kept.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "quick-start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
    **{f"examples/{path.parent.name}/README.md": f"examples/{path.parent.name}.md"
       for path in sorted(ROOT.glob("examples/*/README.md"))},
}  # fmt: skip
"""{path in the repository: path in the site} of the pages outside docs/."""
_PLACES = {there: here for here, there in PAGES.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are outside docs/."""
    for here, there in PAGES.items():
        files.append(File.generated(config, there, content=(ROOT / here).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    return rewritten(markdown, str(page.file.src_uri))


def rewritten(markdown: str, here: str) -> str:
    """Return the text of page `here`, a path in the site, with links for the site; code blocks are not changed."""
    parts = _BLOCK.split(markdown)
    parts[::2] = [_LINK.sub(lambda found: _link(found, here), part) for part in parts[::2]]
    return "".join(parts)


def _link(found: re.Match[str], here: str) -> str:
    image, words, target = found.groups()
    if "://" in target or target.startswith("#"):
        return found[0]
    path, _, anchor = target.partition("#")
    place = _PLACES.get(here, f"docs/{here}")
    there = _site_path(posixpath.normpath(posixpath.join(posixpath.dirname(place), path)))
    if there is None:
        return words
    relative = posixpath.relpath(there, posixpath.dirname(here) or ".")
    return f"{image}[{words}]({relative}{'#' if anchor else ''}{anchor})"


def _site_path(path: str) -> str | None:
    """Return the path in the site of that file of the repository; None if it is not in the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None
