"""Drawings of the protocol: what they show, and that no two moves are drawn over one another."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from sublet_leader.group import grant_transitions as assignments
from tools import drawing, protocol_doc, scenarios_doc
from tools.drawing import Scene

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def paths(picture: str) -> list[str]:
    return [element.attrib["d"] for element in ElementTree.fromstring(picture).findall(f"{SVG}path")]


def test_moves_of_one_span_run_beside_one_another() -> None:
    picture = drawing.states("t", {"a": {"b": ["go"], "c": ["leap"]}, "b": {"c": ["go"], "a": ["back"]}, "c": {}})
    tops = [float(re.findall(r"Q[\d.]+ ([\d.]+)", path)[0]) for path in paths(picture)]
    ends = [re.match(r"M([\d.]+)", path)[1] for path in paths(picture)]  # type: ignore[index]
    assert words(picture).count("go") == 2
    assert {"leap", "back", "a", "b", "c"} <= set(words(picture))
    assert len(set(tops)) == 3  # the two short ones beside one another, the long one above, the one back below
    assert len(set(ends)) == 4


def test_a_lost_message_is_an_arrow_that_ends() -> None:
    def arrow(line: str) -> ElementTree.Element:
        picture = drawing.scenario("t", ["a", "n1"], [Scene(0, "", "", [line])])
        return next(e for e in ElementTree.fromstring(picture).findall(f"{SVG}path") if e.attrib["stroke"] != "#c3c7d1")

    arrived, lost = arrow("a -> n1: ping a/1"), arrow("a -> n1: ping a/1 (lost)")
    assert "marker-end" in arrived.attrib
    assert "marker-end" not in lost.attrib
    assert lost.attrib["stroke"] == drawing.RED


def test_a_scene_shows_when_why_and_what() -> None:
    said = words(drawing.scenario("t", ["a", "n1"], [Scene(2.5, "It is <time>.", "n1 dies", ["(these 2 lines x3)"])]))
    assert {"2.5 s", "It is <time>.", "n1 dies", "(these 2 lines ×3)", "a", "n1"} <= set(said)


def test_a_party_that_stopped_has_a_dashed_lifeline() -> None:
    scenes = [Scene(1, "", "n1 freezes", []), Scene(2, "", "n1 thaws", [])]
    lines = ElementTree.fromstring(drawing.scenario("t", ["a", "n1"], scenes)).findall(f"{SVG}path")
    dashed = ["stroke-dasharray" in line.attrib for line in lines]
    assert sorted(dashed) == [False, False, False, True]


def test_every_story_is_drawn_with_its_speakers() -> None:
    pages = dict(scenarios_doc.pages())
    page = pages.pop(scenarios_doc.PAGE)
    for picture, drawn in pages.items():
        assert f"(pictures/{picture.name})" in page
        text = (scenarios_doc.FILES / f"{picture.stem.removeprefix('scenario-')}.toml").read_text()
        speakers = set(re.findall(r'^  "(\w+) -> ', text, re.MULTILINE))
        assert speakers <= set(words(drawn))


def test_every_move_of_a_machine_is_drawn() -> None:
    drawn = protocol_doc.pictures()["assignment"]
    moves = sum(len(row) for row in protocol_doc.labels(assignments.TRANSITIONS).values())
    assert len(paths(drawn)) == moves
