"""The site's links: what the repository has is what the site has, or the words stay without a link."""

from __future__ import annotations

import re

import yaml

from tools.docs_hooks import PAGES, ROOT, rewritten


def test_links_lead_to_the_pages_of_the_site() -> None:
    assert rewritten("[a](docs/groups.md#watching)", "quick-start.md") == "[a](groups.md#watching)"
    assert rewritten("[a](../README.md#in-spark)", "from-kafka.md") == "[a](quick-start.md#in-spark)"
    assert rewritten("[a](../../docs/epochs.md)", "examples/hourly_closing.md") == "[a](../epochs.md)"
    assert rewritten("[a](../bench.md), [b](index.md)", "decisions/0002-x.md") == "[a](../bench.md), [b](index.md)"
    assert rewritten("![p](pictures/a.svg)", "tutorial.md") == "![p](pictures/a.svg)"


def test_what_the_site_has_not_keeps_its_words() -> None:
    assert rewritten("see [`x.py`](../protocol/x.py).", "pubsub.md") == "see `x.py`."
    for retained in ("[a](https://example.org/x)", "[a](#b)", "```\n[a](../README.md)\n```"):
        assert rewritten(retained, "pubsub.md") == retained


def test_the_navigation_has_every_page() -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    there: set[str] = set()

    def walk(item: object) -> None:
        if isinstance(item, str):
            there.add(item)
        for below in item.values() if isinstance(item, dict) else item if isinstance(item, list) else ():
            walk(below)

    walk(yaml.safe_load(text)["nav"])
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | {"decisions/index.md"} | set(PAGES.values())
    assert pages == there
