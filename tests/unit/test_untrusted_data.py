"""In the product one decoder alone makes Arrow of bytes, which validates them, and nobody makes code of data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_tree import modules

pytestmark = pytest.mark.conforms("X7")

DECODER = "sublet_storage.log.arrow_batch_decoder"
OTHERS = {
    "sublet_storage.log.arrow_batch_header": {"Message"},  # as a type
    "sublet_storage.log.block_encoder": {"new_stream", "IpcWriteOptions", "from_buffers"},  # of integers of its own
    "sublet_storage.log.fast_small_block_decoder": {"from_buffers"},  # of Python's values
    "sublet_storage.producer.batches.fast_small_block_packer": {"from_buffers"},  # the same
    "sublet_storage.producer.batches.routing_table": {"from_buffers"},  # of integers of its own
    "sublet_leader.feed.history_and_follow": {"new_stream"},
    "sublet_borrower.node_client.feed_reader": {"open_stream"},  # of gRPC
}
"""What else of these names is used: to write, mostly."""

FROM_BYTES = {
    "read_message", "read_record_batch", "read_schema", "open_stream", "open_file", "read_tensor", "deserialize_pandas",
    "deserialize", "deserialize_components", "deserialize_from", "from_buffers", "read_feather", "read_serialized",
    "MessageReader", "RecordBatchStreamReader", "RecordBatchFileReader", "FileDecryptionProperties",
    "_import_from_c", "_import_from_c_capsule",
}  # fmt: skip
"""Names of pyarrow by which bytes, or what lies at an address, become Arrow."""

OF_CODE = {
    "pickle", "cloudpickle", "marshal", "shelve", "dill", "unsafe_load", "full_load", "eval", "exec", "compile",
    "read_pickle", "CloudPickleSerializer", "CPickleSerializer", "PickleSerializer", "allow_pickle",
}  # fmt: skip
"""Names by which data become code, or objects of any class."""


def names(path: Path) -> Iterator[tuple[str, str]]:
    """Return (base, name) of what a module imports or uses by name: `re` and `compile`, say."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(base), attr=name):
                yield base, name
            case ast.Attribute(value=ast.Attribute(attr=base), attr=name):
                yield base, name
            case ast.Attribute(attr=name):
                yield "", name
            case ast.Name(id=name) | ast.keyword(arg=str(name)):
                yield "", name
            case ast.Import(names=found):
                for each in found:
                    base, _, name = each.name.rpartition(".")
                    yield base, name
            case ast.ImportFrom(module=module, names=found):
                yield from ((module or "", each.name) for each in found)
                yield "", (module or "").rpartition(".")[2]


@cache
def all_names() -> dict[str, set[tuple[str, str]]]:
    return {module: set(names(path)) for module, path in modules().items()}


def test_arrow_is_decoded_in_one_place() -> None:
    found: dict[str, set[str]] = {}
    for module, used in all_names().items():
        if any("pyarrow" in (base, name) for base, name in used):
            ipc = {name for base, name in used if base.rpartition(".")[2] == "ipc" or name in FROM_BYTES}
            found |= {module: ipc} if ipc else {}
    assert found.pop(DECODER) >= {"read_message", "read_record_batch", "MessageReader", "read_schema"}
    assert found == OTHERS


def test_data_never_become_code() -> None:
    used = {
        f"{module}: {base}.{each}"
        for module, found in all_names().items()
        for base, each in found
        if each in OF_CODE and base != "re"
    }
    assert used == set()


def test_such_names_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "it.py"
    file.write_text(
        "import pyarrow.ipc\nfrom pyarrow import cloudpickle\nfrom pickle import loads\n"
        "pa.ipc.open_stream(x)\neval('1')\nre.compile('a')\nnp.load(x, allow_pickle=True)\n"
    )
    found = set(names(file))
    assert {("pyarrow", "ipc"), ("ipc", "open_stream"), ("re", "compile"), ("", "eval")} <= found
    assert {("pyarrow", "cloudpickle"), ("", "pickle"), ("", "allow_pickle")} <= found
