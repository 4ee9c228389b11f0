"""Every table of the first release, as `tables` declares them.

Nothing was released yet, so the declaration is the only place of a table, and a database of another revision of it is
refused at the start (`opening.py`). The first release freezes this migration: CONTRIBUTING.md says how.
"""

from __future__ import annotations

from alembic import op

from foreshock_service.platform.database.tables import Base

revision = "001"
down_revision = None


def upgrade() -> None:
    Base.metadata.create_all(op.get_bind())
