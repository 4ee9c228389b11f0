"""Column types of blobs and documents that are packed in the database (`service/platform/database/packing.py`)."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Dialect, LargeBinary
from sqlalchemy.types import TypeDecorator

from foreshock_service.platform.database.packing import Packed, pack, unpack


class PackedBytes(TypeDecorator[bytes]):
    """A column of bytes that are packed in the database."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: bytes | Packed | None, dialect: Dialect) -> bytes | None:
        """Pack what is stored; what a decoder has packed already is stored as it is."""
        return None if value is None else value.packed if isinstance(value, Packed) else pack(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        """Return the bytes that were stored."""
        return None if value is None else unpack(bytes(value))


class PackedJson(TypeDecorator[Any]):
    """A column of JSON documents that no query looks into, packed in the database."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes:
        """Pack the document."""
        return pack(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        """Return the document."""
        return None if value is None else json.loads(unpack(bytes(value)))
