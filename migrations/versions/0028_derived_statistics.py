"""Statistics and evidence are packed without what follows from other numbers; older rows stay as they are.

The downgrade packs these blobs as the release before reads them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from foreshock_service.platform.database.migrating import convert_rows
from foreshock_service.platform.database.packing import is_newer_than_sparse, pack_as_sparse, unpack

revision = '0028'
down_revision = '0027'
branch_labels = None
depends_on = None

_STEP = ('run_id', 'attempt', 'step')
_BLOBS = (
    ('shard_statistics', (*_STEP, 'shard', 'comparison'), 'statistics'),
    ('measurement_statistics', (*_STEP, 'comparison'), 'statistics'),
    ('shard_lint', (*_STEP, 'shard'), 'evidence'),
)


def upgrade() -> None:
    pass


def downgrade() -> None:
    for table, key, column in _BLOBS:
        blob = (column, sa.LargeBinary())
        convert_rows(op.get_bind(), table, key, blob, blob, _as_sparse)


def _as_sparse(packed: bytes) -> bytes:
    return pack_as_sparse(unpack(packed)) if is_newer_than_sparse(packed) else packed
