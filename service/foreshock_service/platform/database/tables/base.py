"""Base of all tables, column types that both databases have, identifiers of rows, and the tables of the platform."""

import json
import re
import secrets
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from foreshock.clock import now_us
from foreshock_service.platform.compression import zstd

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_identifier(kind: str) -> str:
    """Return `<kind>_` and 26 base-32 letters: 48 bits of UTC milliseconds, then 80 random bits."""
    number = ((now_us() // 1000) & (2**48 - 1)) << 80 | secrets.randbits(80)
    letters = [_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5)]
    return f"{kind}_{''.join(letters)}"


def is_identifier(kind: str, text: str) -> bool:
    return re.fullmatch(rf"{kind}_[{_ALPHABET}]{{26}}", text) is not None


JsonColumn = sa.JSON().with_variant(JSONB(), "postgresql")

# Alembic needs names that are the same in every database.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
}


class Base(DeclarativeBase):
    """Base of the mapped classes. Times are UTC microseconds in int64 columns named `…_us`; there are no relations."""

    metadata = sa.MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        int: sa.BigInteger,
        float: sa.Double,
        str: sa.String,
        bytes: sa.LargeBinary,
        dict[str, Any]: JsonColumn,
        list[str]: JsonColumn,
    }


class RowOfStep:
    """The key columns of a step's rows; they come first in the table and in its primary key."""

    run_id: Mapped[str] = mapped_column(primary_key=True, sort_order=-3)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, sort_order=-2)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, sort_order=-1)


def references(table: str) -> sa.ForeignKeyConstraint:
    """Return the foreign key of rows of an attempt, of a step with rollouts, or of a shard: of its table."""
    key = ("run_id", "attempt", "step", "shard")[: {"attempts": 2, "steps": 3, "shards": 4}[table]]
    return sa.ForeignKeyConstraint(key, [f"{table}.{name}" for name in key])


class CompressedBytes(TypeDecorator[bytes]):
    """A column of bytes that are compressed with zstd in the database."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: bytes | None, dialect: sa.Dialect) -> bytes | None:
        return None if value is None else zstd.compress(value)

    def process_result_value(self, value: bytes | None, dialect: sa.Dialect) -> bytes | None:
        return None if value is None else zstd.decompress(value)


class CompressedJson(TypeDecorator[Any]):
    """A column of JSON documents that no query looks into, compressed with zstd in the database."""

    impl = CompressedBytes
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> bytes | None:
        return None if value is None else json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def process_result_value(self, value: bytes | None, dialect: sa.Dialect) -> Any:
        return None if value is None else json.loads(value)


class ApiKey(Base):
    """An API key. `project` NULL: every project. Revoked keys are kept, so that a service that had keys requires one.

    `last_used_at_us` is written at most once a minute. Page sessions signed before `sessions_from_us` have ended.
    """

    __tablename__ = "api_keys"
    __table_args__ = (sa.UniqueConstraint("secret_hash"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    project: Mapped[str | None]
    scopes: Mapped[list[str]]
    secret_hash: Mapped[str]
    created_at_us: Mapped[int]
    revoked_at_us: Mapped[int | None]
    expires_at_us: Mapped[int | None]
    last_used_at_us: Mapped[int | None]
    sessions_from_us: Mapped[int] = mapped_column(server_default="0")


class RetiredSecret(Base):
    """The hash of a secret that a rotation replaced; it is valid until `valid_until_us`, and kept for ever."""

    __tablename__ = "retired_secrets"

    secret_hash: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(sa.ForeignKey("api_keys.id"))
    valid_until_us: Mapped[int]


class EndedSession(Base):
    """A page session that was ended by logging out; the row is deleted once the session would have expired."""

    __tablename__ = "ended_sessions"
    __table_args__ = (sa.Index(None, "expires_at_us"),)

    session_hash: Mapped[str] = mapped_column(primary_key=True)
    expires_at_us: Mapped[int]
