"""Stored data: rows in every table, and files in the token store."""

from pathlib import Path

from sqlalchemy import func, select

from foreshock_service.platform.database.session import Database
from foreshock_service.platform.database.tables import Alert, Base
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


def add_alert(database: Database, run: str, step: int, state: str = "open") -> str:
    """Store an alert of the run; return its id."""
    alert = Alert(
        id=f"alert_{step:026}", run_id=run, attempt=1, rule="k3_high", step=step, severity="warning", value=1.0,
        threshold=0.5, why="", what_to_do="", moves_learning_rate=False, evidence={}, state=state, cleared_step=None,
        changed_by="detector", version=1, opened_at_us=1, changed_at_us=1,
    )  # fmt: skip
    database.write(lambda session: session.add(alert))
    return f"alert_{step:026}"
