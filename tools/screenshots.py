"""`python -m tools.screenshots`: takes the pictures of a node's page in docs/pictures.

It starts an embedded Postgres, two nodes, groups with consumers that come and go, and a publisher. Needs Debian's
packages chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.producer import Publisher
from tools.browser import browser
from tools.source_path import source_path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
WAIT_S = 40.0
BILLING = "$share/billing/orders/#"
GROUPS = (BILLING, "$share/audit/#", "$share/shipping/orders/+/created", "$queue/mail/mail/#")


class Scene:
    """Processes on one database, started by commands as a user would."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self._directory = url, directory
        self._environment = {**os.environ, "PYTHONPATH": source_path(ROOT), "SUBLET_DATABASE_URL": url}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._publishing = threading.Thread(target=self._publish)

    def run(self, *arguments: str) -> None:
        """Run a command and wait for its end."""
        subprocess.run(self._argv(*arguments), env=self._environment, check=True, capture_output=True)

    def start(self, name: str, *arguments: str) -> None:
        """Start a command in the background."""
        with (self._directory / name).open("wb") as output:
            self._running[name] = subprocess.Popen(
                self._argv(*arguments), env=self._environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def end(self, name: str) -> None:
        """Send SIGTERM and wait."""
        running = self._running.pop(name)
        running.terminate()
        running.wait(20)

    def address(self, name: str) -> str:
        """Return the HTTP address of a node. Raise `TimeoutError` if it reports none in `WAIT_S`."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if found := re.search(r"answers at (http://\S+)", (self._directory / name).read_text()):
                return found[1]
            time.sleep(0.05)
        raise TimeoutError((self._directory / name).read_text())

    def publish(self) -> None:
        """Publish messages until `close`."""
        self._publishing.start()

    def close(self) -> None:
        """Stop the publisher and all processes."""
        self._stop.set()
        if self._publishing.is_alive():
            self._publishing.join()
        for name in tuple(self._running):
            self.end(name)

    def _publish(self) -> None:
        with Publisher(self.url) as publisher:
            number = 0
            while not self._stop.wait(0.1):
                for _ in range(40):
                    number += 1
                    publisher.publish(f"orders/{number % 5}/created", b"%d" % number, key=b"%d" % (number % 97))
                    publisher.publish("mail/out", b"%d" % number, key=b"%d" % (number % 97))

    @staticmethod
    def _argv(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "sublet.cli", *arguments]


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    """Start nodes, groups and consumers for the `with` block."""
    directory = Path(tempfile.mkdtemp(prefix="sublet-screenshots-"))
    directory.chmod(0o755)
    try:
        with EmbeddedPostgres(directory / "data") as server:
            migrate(server.url)
            played = Scene(server.url, directory)
            try:
                for name in ("n1", "n2"):
                    played.start(name, "leader", "--name", name, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
                for group in GROUPS:
                    played.run("groups", "create", group)
                played.run("groups", "pause", GROUPS[3], "--reason", "the mail server is moved")
                played.publish()
                for name in ("anna", "bruno", "clara"):
                    played.start(name, "consume", BILLING, "--name", name)
                played.start("auditor", "consume", GROUPS[1], "--name", "auditor")
                yield played
            finally:
                played.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


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
        address = played.address("n1")
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


def _wide(driver: Chrome, address: str, played: Scene, play_s: float, where: Path) -> None:
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
