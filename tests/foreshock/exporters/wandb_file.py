"""Reader of the file that W&B writes offline: records of protobuf in LevelDB's log format."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_FULL, _LAST = 1, 4


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the finished run below `folder`, in the order in which they were written."""
    rows = []
    for record in _finished(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def metrics(folder: Path) -> dict[str, str]:
    """Return the defined metrics: name or pattern → axis."""
    defined = [record.metric for record in _finished(folder) if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: str(metric.step_metric) for metric in defined}


def _finished(folder: Path) -> list[Any]:
    """Return all records; `finish()` returns before the last ones are in the file, of which `exit` is the last."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("offline-run-*/run-*.wandb")

    def read() -> list[Any]:
        records = [wandb_internal_pb2.Record.FromString(data) for data in _records(file.read_bytes())]
        return records if records and records[-1].WhichOneof("record_type") == "exit" else []

    return wait_until(read)


def _records(data: bytes) -> Iterator[bytes]:
    position, parts = _HEADER_BYTES, b""
    while position + 7 <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
