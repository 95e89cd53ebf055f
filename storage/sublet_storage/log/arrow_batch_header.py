"""Reads and writes the header of an Arrow record batch message without Arrow.

pyarrow shows none of it, and it matters before the body is decoded: a few compressed bytes can stand for gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa
from msgspec import Struct

HEADER, _BODY_LENGTH, _CUSTOM_METADATA = 2, 3, 4
_LENGTH, _NODES, BUFFERS, _COMPRESSION = 0, 1, 2, 3
"""Where the fields stand in the tables `Message` and `RecordBatch` of Arrow's Message.fbs."""

_PREFIX = 8
"""Bytes before the header of a message: a mark, and how long the header is."""

_UNCOMPRESSED = -1
"""In place of the length of a buffer of a compressed batch that is stored as it is."""


class ArrowBatchHeader(Struct, frozen=True):
    """The numbers of a header. `count`: of messages. `decoded_bytes`: of all buffers, once decompressed."""

    count: int
    decoded_bytes: int
    is_compressed: bool


class ArrowBatchHeaderTemplate:
    """The header of the record batches of one schema, which differ in numbers alone: the number of messages, the length
    of the body, `nodes`, two for each array (its length and its nulls), and `spans`, two for each buffer (its start and
    its size)."""

    def __init__(self, stored: bytes) -> None:
        """`stored`: a message of our own that has a body. Raise `ValueError` where a number is absent."""
        metadata = stored[_PREFIX:]
        root = read_offset(metadata, 0)
        table = read_offset(metadata, _get_field(metadata, root, HEADER))
        self._count = _PREFIX + _get_field(metadata, table, _LENGTH)
        self._body = _PREFIX + _get_field(metadata, root, _BODY_LENGTH)
        self._nodes, self._node_numbers = _find_numbers(metadata, table, _NODES)
        self._spans, self._span_numbers = _find_numbers(metadata, table, BUFFERS)
        self.size = _PREFIX + struct.unpack_from("<I", stored, _PREFIX - 4)[0]
        self._header = stored[: self.size]

    def write(self, count: int, body: int, nodes: Sequence[int], spans: Sequence[int]) -> bytes:
        """Return the header with these numbers. Raise `struct.error` for another number of arrays or buffers."""
        header = bytearray(self._header)
        struct.pack_into("<q", header, self._count, count)
        struct.pack_into("<q", header, self._body, body)
        struct.pack_into(self._node_numbers, header, self._nodes, *nodes)
        struct.pack_into(self._span_numbers, header, self._spans, *spans)
        return bytes(header)

    def read(self, stored: bytes, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the nodes and the spans of a message of `count` messages that has exactly this header; else None."""
        if len(stored) < self.size:
            return None
        nodes = struct.unpack_from(self._node_numbers, stored, self._nodes)
        spans = struct.unpack_from(self._span_numbers, stored, self._spans)
        is_like_this = stored.startswith(self.write(count, len(stored) - self.size, nodes, spans))
        return (nodes, spans) if is_like_this else None


def _find_numbers(metadata: bytes, table: int, index: int) -> tuple[int, str]:
    """Return where the numbers of a vector of pairs stand in the message, and their format."""
    vector = read_offset(metadata, _get_field(metadata, table, index))
    return _PREFIX + vector + 4, f"<{2 * struct.unpack_from('<I', metadata, vector)[0]}q"


def parse_envelope(message: pa.ipc.Message) -> ArrowBatchHeader:
    """Return the parsed header. Raise `ValueError` where it is no record batch, or contradicts itself."""
    if message.type != "record batch":
        raise ValueError(f"Arrow's {message.type!r}, and not a record batch")
    try:
        return _read(message.metadata.to_pybytes(), memoryview(message.body or b""))
    except struct.error as error:
        raise ValueError(f"its header cannot be read: {error}") from None


def _read(metadata: bytes, body: memoryview) -> ArrowBatchHeader:
    root = read_offset(metadata, 0)
    if find_field(metadata, root, _CUSTOM_METADATA) is not None:  # in which Arrow looks for an old kind of compression
        raise ValueError("a record batch with metadata of its own")
    header = find_field(metadata, root, HEADER)
    if header is None:
        raise ValueError("a record batch without a header")
    table = read_offset(metadata, header)
    length = find_field(metadata, table, _LENGTH)
    count = 0 if length is None else struct.unpack_from("<q", metadata, length)[0]
    compressed = find_field(metadata, table, _COMPRESSION) is not None
    buffers = find_field(metadata, table, BUFFERS)
    spans = [] if buffers is None else read_spans(metadata, read_offset(metadata, buffers), len(body))
    if not compressed:
        return ArrowBatchHeader(count, sum(size for _, size in spans), compressed)
    return ArrowBatchHeader(
        count, sum(_read_decoded_size(body, start, size) for start, size in spans if size), compressed
    )


def read_spans(metadata: bytes, vector: int, body: int) -> list[tuple[int, int]]:
    """Return (start, size) of each buffer in the body."""
    (count,) = struct.unpack_from("<I", metadata, vector)
    numbers = struct.unpack_from(f"<{2 * count}q", metadata, vector + 4)
    spans = list(zip(numbers[::2], numbers[1::2], strict=True))
    for start, size in spans:
        if start < 0 or size < 0 or start + size > body:
            raise ValueError(f"a buffer of {size} bytes at {start}, in a body of {body}")
    return spans


def _read_decoded_size(body: memoryview, start: int, size: int) -> int:
    if size < 8:
        raise ValueError(f"a compressed buffer of {size} bytes, without its length")
    (length,) = struct.unpack_from("<q", body, start)
    if length < _UNCOMPRESSED:
        raise ValueError(f"a buffer that decompresses to {length} bytes")
    return size - 8 if length == _UNCOMPRESSED else int(length)


def read_offset(data: bytes, at: int) -> int:
    """Return where the flatbuffer's offset at that place leads."""
    return int(at + struct.unpack_from("<I", data, at)[0])


def find_field(data: bytes, table: int, index: int) -> int | None:
    """Return where a field of a flatbuffer's table stands; None if it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0 or 6 + 2 * index > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * index)[0]
    return table + offset if offset else None


def _get_field(data: bytes, table: int, index: int) -> int:
    position = find_field(data, table, index)
    assert position is not None, f"Arrow writes the field {index} of its own batches"
    return position
