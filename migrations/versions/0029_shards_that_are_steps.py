"""A shard that is its whole step has no rows in `shard_statistics`; those of older steps stay.

The downgrade adds them, without statistics, as the release before writes them.
"""

from __future__ import annotations

from alembic import op

revision = '0029'
down_revision = '0028'
branch_labels = None
depends_on = None

_STEP = ('run_id', 'attempt', 'step')


def upgrade() -> None:
    pass


def downgrade() -> None:
    op.execute(
        'INSERT INTO shard_statistics (run_id, attempt, step, shard, comparison, statistics_version) '
        'SELECT shards.run_id, shards.attempt, shards.step, shards.shard, whole.comparison, whole.statistics_version '
        f'FROM shards JOIN steps ON {_same("steps", "shards")} '
        f'JOIN measurement_statistics AS whole ON {_same("whole", "shards")} '
        "WHERE steps.expected_shards = 1 AND whole.comparison IN ('rollout', 'trainer/rollout') "
        f'AND NOT EXISTS (SELECT 1 FROM shard_statistics AS own WHERE {_same("own", "shards")})'
    )


def _same(one: str, other: str) -> str:
    return ' AND '.join(f'{one}.{name} = {other}.{name}' for name in _STEP)
