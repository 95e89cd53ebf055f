"""Code for a cluster: an environment as venv-pack makes it, with what sublet needs but without it, and sublet's zip."""

from __future__ import annotations

import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.kit_nodes import ROOT

LEFT_OUT = {"pyspark", "py4j", "sublet"}
"""Spark brings its own, and of ours the test sends the code apart."""
SPARED = {"__pycache__", "include", "tests"}
PACKAGES = (
    "borrower/pyspark_sublet",
    "borrower/sublet_borrower",
    "leader/sublet_leader",
    "protocol/sublet_protocol",
    "storage/sublet_storage",
    "sublet",
)


def pack_environment(target: Path) -> None:
    """A relocatable environment with the packages of `sublet[spark]`."""
    site = Path(sysconfig.get_path("purelib"))
    inside = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    home = Path(sys.executable).resolve()
    config = target.parent / "pyvenv.cfg"
    config.write_text(f"home = {home.parent}\ninclude-system-site-packages = false\n")
    link = target.parent / "python"
    link.symlink_to(home)
    with tarfile.open(target, "w:gz", compresslevel=0) as archive:
        archive.add(config, "pyvenv.cfg")
        archive.add(link, "bin/python")
        for name in sorted(_needed("sublet", {"spark"})):
            for file in distribution(name).files or ():
                path = Path(str(distribution(name).locate_file(file))).resolve()
                if path.is_relative_to(site.resolve()) and path.is_file() and not SPARED.intersection(path.parts):
                    archive.add(path, f"{inside}/{path.relative_to(site.resolve())}")


def zip_code(target: Path) -> None:
    """What a wheel of sublet has."""
    with zipfile.ZipFile(target, "w") as archive:
        for package in PACKAGES:
            for file in sorted((ROOT / package).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, file.relative_to((ROOT / package).parent))


def _needed(name: str, extras: set[str]) -> set[str]:
    """Names of the distributions that it needs, and what these need."""
    found: set[str] = set()
    for text in distribution(name).requires or ():
        required = Requirement(text)
        wanted = required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in extras | {""})
        if wanted and required.name not in LEFT_OUT:
            found |= {required.name} | _needed(required.name, set(required.extras))
    return found
