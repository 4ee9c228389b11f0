"""Every table of this revision, by subject in the folder `every_table`."""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.util import load_python_file

from foreshock_service.platform.database.tables.base import make_append_only

revision = '0040'
down_revision = None
branch_labels = None
depends_on = None

# In the order that foreign keys allow.
SUBJECTS = ("runs", "watch", "probes")


def upgrade() -> None:
    for subject in SUBJECTS:
        load_python_file(str(Path(__file__).parent / "every_table"), f"{subject}.py").create()
    make_append_only(op.get_bind())


def downgrade() -> None:
    raise NotImplementedError("there is no schema before the first one")
