"""`python -m tools.screenshots`: takes the pictures of a node's page in docs/pictures.

It starts an embedded Postgres, two nodes, groups with consumers that come and go, and a publisher. Needs Debian's
packages chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from sublet_storage.producer import Publisher
from tools.browser import browser
from tools.stage import ROOT, Stage, stage

PICTURES = ROOT / "docs" / "pictures"
WAIT_S = 40.0
BILLING = "$share/billing/orders/#"
GROUPS = (BILLING, "$share/audit/#", "$share/shipping/orders/+/created", "$queue/mail/mail/#")


@contextmanager
def scene() -> Iterator[Stage]:
    """Start nodes, groups, consumers and a publisher for the `with` block."""
    with stage({}) as play:
        play.serve("n1", "n2")
        for group in GROUPS:
            play.run(f"sublet groups create '{group}'")
        play.run(f"sublet groups pause '{GROUPS[3]}' --reason 'the mail server is moved'")
        for name in ("anna", "bruno", "clara"):
            play.start(name, "consume", BILLING, "--name", name)
        play.start("auditor", "consume", GROUPS[1], "--name", "auditor")
        has_ended = threading.Event()
        publishing = threading.Thread(target=_publish, args=(play.url, has_ended))
        publishing.start()
        try:
            yield play
        finally:
            has_ended.set()
            publishing.join()


def _publish(url: str, has_ended: threading.Event) -> None:
    with Publisher(url) as publisher:
        number = 0
        while not has_ended.wait(0.1):
            for _ in range(40):
                number += 1
                publisher.publish(f"orders/{number % 5}/created", b"%d" % number, key=b"%d" % (number % 97))
                publisher.publish("mail/out", b"%d" % number, key=b"%d" % (number % 97))


def shoot(driver: Chrome, name: str, where: Path) -> None:
    """Write a picture of the page as the browser shows it."""
    (where / name).write_bytes(driver.get_screenshot_as_png())


def main(arguments: list[str] | None = None) -> int:
    """Start the scene and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=PICTURES)
    parser.add_argument("--minutes", type=float, default=1.5, help="how long the scene is played before")
    given = parser.parse_args(arguments)
    with scene() as played, tempfile.TemporaryDirectory() as profiles:
        [address] = re.findall(r"answers at (http://\S+)", played.output("n1"))
        driver = browser(1180, 1100, Path(profiles) / "wide")
        try:
            _wide(driver, address, played, given.minutes * 60, given.to)
        finally:
            driver.quit()
        driver = browser(500, 900, Path(profiles) / "narrow")
        try:
            _narrow(driver, address, given.to)
        finally:
            driver.quit()
    return 0


def _wide(driver: Chrome, address: str, played: Stage, play_s: float, where: Path) -> None:
    """Take pictures of a group that a consumer has just joined, and of the list."""
    driver.get(_group(address))
    _wait(driver, "document.querySelectorAll('.chip').length == 16")
    time.sleep(play_s)
    played.start("dora", "consume", BILLING, "--name", "dora")
    _wait(driver, "document.querySelectorAll('.chip.moved').length > 0")
    time.sleep(1.0)
    shoot(driver, "page-group.png", where)
    driver.get(f"{address}#/")
    _wait(driver, "document.body.innerText.includes('Lag over time')")
    driver.set_window_size(1180, 560)
    time.sleep(1.5)
    shoot(driver, "page-groups.png", where)


def _narrow(driver: Chrome, address: str, where: Path) -> None:
    """Take a picture at the width of a phone, in dark mode."""
    metrics = {"width": 360, "height": 780, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    driver.get(_group(address))
    _wait(driver, "document.querySelectorAll('.chip').length == 16")
    time.sleep(1.0)
    shoot(driver, "page-narrow.png", where)


def _group(address: str) -> str:
    return f"{address}#/group/{quote(BILLING, safe='')}"


def _wait(driver: Chrome, fact: str) -> None:
    WebDriverWait(driver, WAIT_S).until(lambda driver: driver.execute_script(f"return {fact}"))


if __name__ == "__main__":
    sys.exit(main())
