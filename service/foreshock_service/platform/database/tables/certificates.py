"""Certificates of engines."""

from typing import Any

from sqlalchemy import Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from foreshock_service.platform.database.tables.base import Base, CompressedJson


class StoredCertificate(Base):
    """A certificate whole, and in short as lists have it. `digest` is that of the document as canonical JSON."""

    __tablename__ = "certificates"
    __table_args__ = (UniqueConstraint("project", "digest"), Index(None, "created_at_us", "id"))

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str]
    digest: Mapped[str]
    summary: Mapped[dict[str, Any]] = mapped_column(CompressedJson)
    document: Mapped[dict[str, Any]] = mapped_column(CompressedJson)
    created_at_us: Mapped[int]
