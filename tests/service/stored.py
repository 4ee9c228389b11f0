"""Stored data: rows in every table, and files in the token store."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import func, select

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Base
from foreshock_service.platform.settings import Settings


def count_rows(settings: Settings) -> dict[str, int]:
    """Return the number of rows by table, without empty tables."""
    database = Database(settings.database_url)
    try:
        with database.read() as session:
            counts = {
                table.name: session.scalar(select(func.count()).select_from(table)) or 0
                for table in Base.metadata.sorted_tables
            }
    finally:
        database.close()
    return {name: count for name, count in counts.items() if count}


def list_files(settings: Settings) -> list[str]:
    """Return the files in the token store, temporary ones included, without the locks of processes."""
    root = Path(settings.store_url)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
