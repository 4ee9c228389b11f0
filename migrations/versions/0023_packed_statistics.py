"""Statistics of a step that is one shard are held once, and blobs are packed; older rows stay as they are.

The downgrade unpacks every blob and gives the shards their statistics back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from service.platform.database.packing import pack, unpack

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
_AT_ONCE = 500


def upgrade() -> None:
    with op.batch_alter_table('shard_statistics') as batch:
        batch.alter_column('statistics', existing_type=sa.LargeBinary(), nullable=True)
    op.add_column('step_lint', sa.Column('packed_report', sa.LargeBinary(), nullable=True))
    _convert(*_STEP_LINT, 'report', _JSON, 'packed_report', sa.LargeBinary(), _packed_document)
    with op.batch_alter_table('step_lint') as batch:
        batch.drop_column('report')
        batch.alter_column(
            'packed_report', new_column_name='report', existing_type=sa.LargeBinary(), nullable=False
        )


def downgrade() -> None:
    for table, key, columns in _BLOBS:
        for column in columns:
            _convert(table, key, column, sa.LargeBinary(), column, sa.LargeBinary(), unpack)
    op.execute(
        'UPDATE shard_statistics SET (statistics, summaries) = (SELECT whole.statistics, whole.summaries FROM '
        'measurement_statistics AS whole WHERE '
        + ' AND '.join(f'whole.{name} = shard_statistics.{name}' for name in (*_STEP, 'comparison'))
        + ') WHERE statistics IS NULL'
    )
    with op.batch_alter_table('shard_statistics') as batch:
        batch.alter_column('statistics', existing_type=sa.LargeBinary(), nullable=False)
    op.add_column('step_lint', sa.Column('plain_report', _JSON, nullable=True))
    _convert(*_STEP_LINT, 'report', sa.LargeBinary(), 'plain_report', _JSON, _document)
    with op.batch_alter_table('step_lint') as batch:
        batch.drop_column('report')
        batch.alter_column('plain_report', new_column_name='report', existing_type=_JSON, nullable=False)


def _packed_document(document: Any) -> bytes:
    return pack(json.dumps(document, ensure_ascii=False, separators=(',', ':')).encode())


def _document(packed: bytes) -> Any:
    return json.loads(unpack(packed))


def _convert(
    table_name: str,
    key: Iterable[str],
    source: str,
    source_type: Any,
    target: str,
    target_type: Any,
    convert: Callable[[Any], Any],
) -> None:
    """Set `target` of each row to the converted `source`, some rows at a time."""
    names = tuple(key)
    table = sa.table(table_name, *map(sa.column, names), sa.column(source, source_type))
    changed = sa.table(table_name, *map(sa.column, names), sa.column(target, target_type))
    columns = [table.c[name] for name in names]
    of_row = (changed.c[name] == sa.bindparam(f'key_{name}') for name in names)
    statement = sa.update(changed).where(*of_row).values({target: sa.bindparam('converted', type_=target_type)})
    query = sa.select(*columns, table.c[source]).where(table.c[source].is_not(None)).order_by(*columns)
    connection, after = op.get_bind(), None
    while True:
        page = query if after is None else query.where(sa.tuple_(*columns) > sa.tuple_(*map(sa.literal, after)))
        rows = connection.execute(page.limit(_AT_ONCE)).all()
        if not rows:
            return
        after = tuple(rows[-1][:-1])
        connection.execute(
            statement,
            [
                {**{f'key_{column.name}': value for column, value in zip(columns, row, strict=False)},
                 'converted': convert(row[-1])}
                for row in rows
            ],
        )
