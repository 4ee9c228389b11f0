"""Base of all tables: the registry, constraint names, and column types that both databases have."""

from __future__ import annotations

import json
import sys
from typing import Any

from sqlalchemy import JSON, BigInteger, Dialect, Double, LargeBinary, MetaData, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

JsonColumn = JSON().with_variant(JSONB(), "postgresql")

# Alembic needs names that are the same everywhere.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}


class Base(DeclarativeBase):
    """Base of the mapped classes. Times are UTC microseconds in int64 columns named `…_us`; there are no relations."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        int: BigInteger,
        float: Double,
        str: String,
        bytes: LargeBinary,
        dict[str, Any]: JsonColumn,
        list[str]: JsonColumn,
    }


class CompressedBytes(TypeDecorator[bytes]):
    """A column of bytes that are compressed with zstd in the database."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        """Compress what is stored."""
        return None if value is None else zstd.compress(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> bytes | None:
        """Return the bytes that were stored."""
        return None if value is None else zstd.decompress(value)


class CompressedJson(TypeDecorator[Any]):
    """A column of JSON documents that no query looks into, compressed with zstd in the database."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes:
        """Compress the document."""
        return zstd.compress(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        """Return the document."""
        return None if value is None else json.loads(zstd.decompress(value))
