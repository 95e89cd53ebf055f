"""The commands of docs/operations.md end as the page says, and answer in the same shapes."""

from __future__ import annotations

import pytest

from tools import transcripts


@pytest.mark.long
@pytest.mark.conforms("A9")
@pytest.mark.timeout(300)
def test_the_page_for_who_is_on_call_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert transcripts.main(["--check"]) == 0, capsys.readouterr().out


def test_only_what_differs_in_shape_is_reported() -> None:
    page = '```console\n$ sublet nodes list\nNAME  LEADS\nn1        1\n\n$ sublet x --json\n{"a":[{"b":1}]}\n```\n'
    same = page.replace("n1        1", "n2        7").replace('"b":1', '"b":2')
    assert transcripts.shapes(page) == transcripts.shapes(same)
    for other in (
        page.replace("LEADS", "LED"),
        page.replace('"b"', '"c"'),
        page.replace("        1\n", "        1\n[exit code 1]\n"),
    ):
        assert transcripts.shapes(page) != transcripts.shapes(other)


def test_every_scene_of_the_page_is_known() -> None:
    found = [part["scene"] for part in transcripts._PART.finditer(transcripts.PAGE.read_text()) if part["scene"]]
    assert set(found) == set(transcripts.SCENES)
