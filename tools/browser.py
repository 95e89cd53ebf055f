"""A headless Chromium from Debian's packages, for page tests and screenshots."""

from __future__ import annotations

import shutil
from pathlib import Path

from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing() -> str | None:
    """Return what must be installed first; None means nothing."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} here: apt-get install chromium chromium-driver" if absent else None


def browser(width: int, height: int, profile: Path) -> Chrome:
    """Return a Chromium with a new profile. Raise `FileNotFoundError` if it is not installed."""
    if (problem := missing()) is not None:
        raise FileNotFoundError(problem)
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    return Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
