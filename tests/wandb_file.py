"""Reads what an offline W&B run wrote: LevelDB log blocks of protobuf records."""

import json
import struct
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_MESSAGES: Any = wandb_internal_pb2  # its classes are made while it is imported
_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")


def read_wandb_file(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run's config and its history rows, each with its ``_step``."""
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for payload in _records(path.read_bytes()):
        record = _MESSAGES.Record()
        record.ParseFromString(payload)
        for update in [*record.run.config.update, *record.config.update]:
            config[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
        if record.HasField("history"):
            history.append(_row(record.history.item))
    return config, history


def read_wandb_group(path: Path) -> str:
    """Return the name of the group that the run is in."""
    group = ""
    for payload in _records(path.read_bytes()):
        record = _MESSAGES.Record()
        record.ParseFromString(payload)
        group = record.run.run_group or group
    return group


def _row(items: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for item in items:
        *outer, name = list(item.nested_key) or [item.key]
        place = row
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return row


def _records(data: bytes) -> list[bytes]:
    records: list[bytes] = []
    partial, place = b"", 7  # the file starts with a header of seven bytes
    while place + _HEADER.size <= len(data):
        left_in_block = _BLOCK - place % _BLOCK
        if left_in_block < _HEADER.size:
            place += left_in_block
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        partial += data[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or last part
            records.append(partial)
            partial = b""
    return records
