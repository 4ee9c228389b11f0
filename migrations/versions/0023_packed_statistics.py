"""Statistics of a step that is one shard are held once, and blobs are packed; older rows stay as they are.

The downgrade unpacks every blob and gives the shards their statistics back.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from foreshock_service.platform.database.migrating import convert_rows
from foreshock_service.platform.database.packing import pack, unpack

revision = '0023'
down_revision = '0022'
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(postgresql.JSONB(), 'postgresql')
_STEP = ('run_id', 'attempt', 'step')
_BLOBS = (
    ('shard_statistics', (*_STEP, 'shard', 'comparison'), ('statistics', 'summaries')),
    ('measurement_statistics', (*_STEP, 'comparison'), ('statistics', 'summaries')),
    ('shard_lint', (*_STEP, 'shard'), ('evidence',)),
    ('detector_snapshots', _STEP, ('state',)),
)
_STEP_LINT = ('step_lint', _STEP)


def upgrade() -> None:
    with op.batch_alter_table('shard_statistics') as batch:
        batch.alter_column('statistics', existing_type=sa.LargeBinary(), nullable=True)
    op.add_column('step_lint', sa.Column('packed_report', sa.LargeBinary(), nullable=True))
    convert_rows(
        op.get_bind(), *_STEP_LINT, ('report', _JSON), ('packed_report', sa.LargeBinary()), _packed_document
    )
    with op.batch_alter_table('step_lint') as batch:
        batch.drop_column('report')
        batch.alter_column(
            'packed_report', new_column_name='report', existing_type=sa.LargeBinary(), nullable=False
        )


def downgrade() -> None:
    for table, key, columns in _BLOBS:
        for column in columns:
            blob = (column, sa.LargeBinary())
            convert_rows(op.get_bind(), table, key, blob, blob, unpack)
    op.execute(
        'UPDATE shard_statistics SET (statistics, summaries) = (SELECT whole.statistics, whole.summaries FROM '
        'measurement_statistics AS whole WHERE '
        + ' AND '.join(f'whole.{name} = shard_statistics.{name}' for name in (*_STEP, 'comparison'))
        + ') WHERE statistics IS NULL'
    )
    with op.batch_alter_table('shard_statistics') as batch:
        batch.alter_column('statistics', existing_type=sa.LargeBinary(), nullable=False)
    op.add_column('step_lint', sa.Column('plain_report', _JSON, nullable=True))
    convert_rows(op.get_bind(), *_STEP_LINT, ('report', sa.LargeBinary()), ('plain_report', _JSON), _document)
    with op.batch_alter_table('step_lint') as batch:
        batch.drop_column('report')
        batch.alter_column('plain_report', new_column_name='report', existing_type=_JSON, nullable=False)


def _packed_document(document: Any) -> bytes:
    return pack(json.dumps(document, ensure_ascii=False, separators=(',', ':')).encode())


def _document(packed: bytes) -> Any:
    return json.loads(unpack(packed))
