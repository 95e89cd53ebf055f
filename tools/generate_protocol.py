"""Generates `protocol/sublet_protocol/v1/sublet_pb2*.py` from `protocol/sublet_protocol/v1/sublet.proto`.

The output is checked in, and made by the oldest compiler we support, because generated code refuses to load under a
runtime older than its compiler: grpcio-tools 1.62 (protobuf 4.25) writes code that every later runtime imports. The
compiler therefore runs in a throw-away virtual environment of its own.

    python tools/generate_protocol.py            write the files
    python tools/generate_protocol.py --check    fail if they differ from what would be written
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = ("grpcio-tools==1.62.3", "protobuf==4.25.8", "setuptools<81")
PROTO = "sublet_protocol/v1/sublet.proto"
GENERATED = ("sublet_pb2.py", "sublet_pb2.pyi", "sublet_pb2_grpc.py")


def generate(target: Path) -> None:
    """Write the generated files below `target`, at their path in the package."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch, "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *COMPILER], check=True)
        outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
        protoc = [str(python), "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'protocol'}"]
        subprocess.run([*protoc, *outputs, PROTO], check=True)


def differences(fresh: Path) -> list[str]:
    """Return the generated files whose checked-in text is not what the compiler writes."""
    places = {name: Path(PROTO).with_name(name) for name in GENERATED}
    pairs = ((name, ROOT / "protocol" / place, fresh / place) for name, place in places.items())
    return [name for name, old, new in pairs if not old.exists() or old.read_bytes() != new.read_bytes()]


def main() -> int:
    """Write the files, or with `--check` compare them; return 1 if they differ."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true")
    if not arguments.parse_args().check:
        generate(ROOT / "protocol")
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        stale = differences(Path(fresh))
    print("\n".join(f"{name} is stale: run tools/generate_protocol.py" for name in stale))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
