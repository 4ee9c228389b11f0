"""Base of all tables: the registry, constraint names, and column types that both databases have."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, LargeBinary, MetaData, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase

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
