"""The web page in a real Chromium: what it shows, that it is live, by keyboard, on a phone, and whatever groups are
called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.desired_state import PauseGroup, ResumeGroup
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.node_directory import NodeIncarnation, register
from sublet_storage.spaces.space_changes import reshard
from tests.integration.http_kit import Http, served
from tests.integration.log_kit import go_over_to_another_timeline
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually
from tools.browser import browser, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

TOKEN = "the-token-of-an-admin"
TURNED = "$share/a\u202etnuocca\u200b\u2003  /x"
EVIL = "$share/<img src=x onerror=document.title='taken'>/\"><script>alert(1)</script>/x"


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for all of these tests: it takes long to start."""
    driver = browser(1200, 900, tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def stage_settings() -> dict[str, str]:
    return {"SUBLET_HTTP": "yes", "SUBLET_ADMIN_TOKEN": TOKEN}


@pytest.fixture
def stage(stage: Stage) -> Stage:
    reshard(stage.scene.connection, "default", 4)
    return stage


def js(chrome: Chrome, what: str) -> Any:
    return chrome.execute_script(f"return {what}")


def shown(chrome: Chrome, *texts: str) -> None:
    said = "document.body.innerText"
    eventually(lambda: all(text in js(chrome, said) for text in texts), WAIT_S, lambda: str(js(chrome, said)), 0.05)


def lanes(chrome: Chrome) -> dict[str, str]:
    """Return {member: streams}, from the picture's description for screen readers."""
    reported = str(js(chrome, "document.getElementById('lanes-desc')?.textContent ?? ''"))
    return dict(each.split(": ") for each in reported.split("; ") if ": " in each)


def complaints(chrome: Chrome) -> list[str]:
    entries = chrome.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries if "favicon" not in entry["message"]]


@pytest.mark.conforms("A2", "A7")
def test_a_group_is_seen_live_and_acted_on_by_keyboard(stage: Stage, chrome: Chrome) -> None:
    node = served(stage)
    complaints(chrome)
    chrome.get(f"http://{node.address}/#/")
    shown(chrome, "There are no groups yet")
    stage.fleet.consumer("a", ALL, session="anna")
    shown(chrome, ALL, "consuming", "n1")
    link = chrome.find_element(By.LINK_TEXT, ALL)
    link.send_keys(Keys.ENTER)
    eventually(lambda: {who: len(of.split(", ")) for who, of in lanes(chrome).items()} == {"anna": 4}, WAIT_S)
    assert js(chrome, "document.title") == f"{ALL} – sublet"
    eventually(lambda: js(chrome, "document.activeElement.id") == "main", WAIT_S)
    # What is copied is not replaced meanwhile, and what is not is.
    chrome.execute_script("getSelection().selectAllChildren(document.querySelector('dd'))")
    stage.fleet.consumer("b", ALL, session="bruno")
    eventually(
        lambda: {who: len(of.split(", ")) for who, of in lanes(chrome).items()} == {"anna": 2, "bruno": 2}, WAIT_S
    )
    assert js(chrome, "document.querySelectorAll('.chip.moved').length") == 2, "those that moved are seen to have moved"
    assert js(chrome, "getSelection().toString()") == "consuming"
    chrome.execute_script("getSelection().removeAllRanges()")
    shown(chrome, "rebalance", "allocated")
    eventually(lambda: "bruno" in js(chrome, "document.getElementById('said').textContent"), WAIT_S)
    rows = js(chrome, "[...document.querySelectorAll('section:last-child tbody tr')].map(r => r.innerText)")
    assert sum("anna" in row for row in rows) == sum("bruno" in row for row in rows) == 2, "and a table says the same"
    # By keyboard alone.
    keys = ActionChains(chrome)
    chrome.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    keys.send_keys(Keys.TAB, "the sink", Keys.TAB, "wrong token here", Keys.TAB, Keys.ENTER).perform()
    shown(chrome, "the admin token is missing or wrong")
    field = chrome.find_element(By.ID, "token")
    field.clear()
    field.send_keys(TOKEN)
    chrome.find_element(By.ID, "do-pause").send_keys(Keys.ENTER)
    shown(chrome, "paused", "the sink")
    eventually(lambda: "held by nobody" in lanes(chrome), WAIT_S)
    assert not chrome.find_element(By.ID, "token").is_displayed()
    eventually(lambda: chrome.find_element(By.ID, "do-resume").is_enabled(), WAIT_S)
    chrome.find_element(By.ID, "do-resume").send_keys(Keys.ENTER)
    eventually(lambda: set(lanes(chrome)) == {"anna", "bruno"}, WAIT_S)
    refused = [each for each in complaints(chrome) if "401" not in each]
    assert refused == []
    pigeons = NodeIncarnation("other", "a life", "127.0.0.1:1")
    register(stage.scene.connection, pigeons, 600, 1, notify_endpoint="pigeons:coop")
    chrome.get(f"http://{node.address}/#/nodes")
    shown(chrome, "n1", "alive", "127.0.0.1", "other", "pigeons")
    # The node goes away, and that is said.
    stage.fleet.nodes["n1"].kill()
    shown(chrome, "this node does not answer")


@pytest.mark.long
def test_many_groups_are_searched_and_paged(stage: Stage, chrome: Chrome) -> None:
    store = PostgresGroupStore(stage.scene.url)
    for number in range(60):
        store.declare_group(Subscription.parse(f"$share/g{number:02}/#"), GroupOptions())
    for strange in (EVIL, TURNED):
        store.declare_group(Subscription.parse(strange), GroupOptions())
    store.close()
    node = served(stage)
    complaints(chrome)
    chrome.get(f"http://{node.address}/#/")
    shown(chrome, "1–50 of 62", "$share/g01/#", EVIL, r"$share/a\u{202e}tnuocca\u{200b}\u{2003} \u{20}/x")
    chrome.find_element(By.ID, "page-Next").click()
    shown(chrome, "51–62 of 62", "$share/g59/#", "no consumers")
    chrome.find_element(By.LINK_TEXT, "$share/g59/#").click()
    shown(chrome, "Who holds what")
    chrome.back()
    shown(chrome, "51–62 of 62", "$share/g59/#")
    chrome.find_element(By.ID, "sort-name").click()
    shown(chrome, "1–50 of 62")
    ordered = "document.querySelector('th[aria-sort]')?.getAttribute('aria-sort')"
    eventually(lambda: js(chrome, ordered) == "descending", WAIT_S)
    assert js(chrome, "document.querySelector('tbody th')?.innerText") == "$share/g59/#"
    chrome.find_element(By.ID, "search").send_keys("ONERROR")
    shown(chrome, "1–1 of 1", EVIL)
    chrome.find_element(By.LINK_TEXT, EVIL).click()
    eventually(lambda: js(chrome, "document.querySelector('h1')?.textContent") == EVIL, WAIT_S)
    shown(chrome, "Who holds what", "no consumers")
    assert js(chrome, "document.title") == f"{EVIL} – sublet"
    assert js(chrome, "document.images.length") == 0
    assert complaints(chrome) == []


@pytest.mark.conforms("A7")
def test_after_a_failover_each_line_is_shown_once(stage: Stage, chrome: Chrome) -> None:
    store = PostgresGroupStore(stage.scene.url)
    store.declare_group(Subscription.parse(ALL), GroupOptions())
    node = served(stage)
    chrome.get(f"http://{node.address}/#/group/{quote(ALL, safe='')}")
    store.apply_command(Subscription.parse(ALL), PauseGroup("the sink is repaired"))
    shown(chrome, "paused: the sink is repaired")
    go_over_to_another_timeline(stage.scene.connection)
    store.apply_command(Subscription.parse(ALL), ResumeGroup())
    shown(chrome, "resumed")
    assert js(chrome, "document.body.innerText").count("paused: the sink is repaired") == 1
    store.close()


@pytest.mark.long
def test_a_missing_group_is_said_once(stage: Stage, chrome: Chrome) -> None:
    node = served(stage)
    chrome.get(f"http://{node.address}/#/group/{quote(ALL, safe='')}")
    shown(chrome, "there is no such group")
    chrome.execute_script(
        "window.written = 0; window.looks = 0; const real = fetch;"
        "window.fetch = (...given) => { window.looks += 1; return real(...given); };"
        "new MutationObserver(() => { window.written += 1; }).observe(document.getElementById('trouble'),"
        " { childList: true, characterData: true, subtree: true })"
    )
    eventually(lambda: js(chrome, "window.looks") >= 9, WAIT_S)
    assert js(chrome, "window.written") == 0, "what is read aloud is read once"
    assert not chrome.find_element(By.CLASS_NAME, "actions").is_displayed()
    PostgresGroupStore(stage.scene.url).declare_group(Subscription.parse(ALL), GroupOptions())
    eventually(lambda: chrome.find_element(By.CLASS_NAME, "actions").is_displayed(), WAIT_S)
    assert not chrome.find_element(By.ID, "trouble").is_displayed()
    chrome.find_element(By.TAG_NAME, "summary").click()
    for token, said in (("", "the admin token is missing or wrong"), ("pässwört-of-an-admin", "ASCII characters only")):
        chrome.find_element(By.ID, "token").clear()
        chrome.find_element(By.ID, "token").send_keys(token)
        chrome.find_element(By.ID, "do-pause").click()
        shown(chrome, said)
    complaints(chrome)


@pytest.mark.long
def test_no_leader_is_red_where_consumers_wait_for_one(stage: Stage, chrome: Chrome) -> None:
    stage.serve("n1")
    stage.fleet.consumer("a", ALL)
    eventually(lambda: stage.scene.shares() == [4], WAIT_S, stage.said)
    stage.fleet.nodes["n1"].kill()
    stage.fleet.consumers["a"].kill()
    stage.serve("n2")  # nobody asks it for the group, whose streams are held until it is led
    chrome.get(f"http://{Http.of(stage.fleet.nodes['n2']).address}/#/")
    found = "[...document.querySelectorAll('td .badge')].map((each) => [each.textContent, each.className])"
    eventually(lambda: js(chrome, found) == [["no leader", "badge bad"]], WAIT_S, lambda: str(js(chrome, found)))


@pytest.mark.long
def test_pages_fit_any_width_and_screen_readers(stage: Stage, chrome: Chrome) -> None:
    node = served(stage)
    stage.fleet.consumer("a", ALL, session="a-consumer-with-a-rather-long-name-of-its-own")
    eventually(lambda: stage.scene.shares() == [4], WAIT_S, stage.said)
    for width in (360, 1200):
        metrics = {"width": width, "height": 780, "deviceScaleFactor": 1, "mobile": width < 500}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for path, text in (("", ALL), ("nodes", "This node"), (f"group/{quote(ALL, safe='')}", "What happened")):
            chrome.get("about:blank")
            chrome.get(f"http://{node.address}/#/{path}")
            shown(chrome, text, "n1")
            eventually(lambda: js(chrome, "document.querySelectorAll('main table').length") >= 1, WAIT_S)
            is_well_made(chrome, width)
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**metrics, "width": 900})
    chrome.get(f"http://{node.address}/#/nodes")
    shown(chrome, "This node", "database")
    lines = chrome.execute_script(
        "const name = [...document.querySelectorAll('tbody th')].find((each) => each.innerText === 'database');"
        "name.closest('tr').lastChild.textContent = 'it did not answer, and that is said at length. '.repeat(40);"
        "const range = document.createRange(); range.selectNodeContents(name); return range.getClientRects().length"
    )
    assert lines == 1, "a long reason leaves names in one piece"
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def is_well_made(chrome: Chrome, width: int) -> None:
    assert js(chrome, "document.documentElement.scrollWidth") <= width, chrome.current_url
    assert js(chrome, "document.querySelectorAll('header, nav[aria-label], main').length") >= 3
    assert js(chrome, "document.querySelectorAll('h1').length") == 1
    for unnamed in (
        "table:not(:has(caption))",
        "th:not([scope])",
        "svg[role=img]:not(:has(title))",
        "button:empty",
        "section:not([aria-labelledby])",
    ):
        assert js(chrome, f"document.querySelectorAll('{unnamed}').length") == 0, (chrome.current_url, unnamed)
    chrome.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    outline = js(chrome, "getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the keyboard is can be seen"
