"""The checked-in generated code says what `sublet.proto` says, and loads under old libraries as under new ones."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from google.protobuf import descriptor_pb2

from sublet_protocol.v1 import sublet_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_code_is_of_the_proto_file(tmp_path: Path) -> None:
    """But for the JSON names, which a descriptor set spells out."""
    target = tmp_path / "set"
    command = ["-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'protocol'}", f"--descriptor_set_out={target}"]
    subprocess.run([sys.executable, *command, "sublet_protocol/v1/sublet.proto"], check=True, timeout=60)
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    checked_in = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    ours, theirs = (
        [line for line in str(file).splitlines() if "json_name" not in line] for file in (checked_in, fresh)
    )
    assert ours == theirs, "run tools/generate_protocol.py"


def test_the_generated_code_is_as_old_as_our_floors() -> None:
    text = (ROOT / "protocol/sublet_protocol/v1/sublet_pb2.py").read_text()
    generated = re.search(r"Protobuf Python Version: (\d+)\.(\d+)", text)
    assert generated is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [line for line in project["dependencies"] if line.startswith("protobuf")]
    floor = re.search(r">=(\d+)\.(\d+)", required[0])
    assert floor is not None
    assert generated.groups() == floor.groups()
    assert "ValidateProtobufRuntimeVersion" not in text  # code that newer compilers write; it refuses old runtimes
