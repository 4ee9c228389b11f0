"""Steps count the shards of their fold; detectors and alerts are read by step, however long the run is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0007'
down_revision = '0006'
branch_labels = None
depends_on = None

UNFOLDED = sa.text("folded_shards < received_shards")


def upgrade() -> None:
    op.add_column("steps", sa.Column("folded_shards", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE steps SET folded_shards = received_shards WHERE closed_at_us IS NOT NULL")
    op.drop_index("ix_steps_closed_at_us_last_shard_at_us", table_name="steps")
    op.create_index(
        "ix_steps_unfolded", "steps", ["last_shard_at_us"], sqlite_where=UNFOLDED, postgresql_where=UNFOLDED
    )
    op.create_index("ix_detector_snapshots_run_id_step", "detector_snapshots", ["run_id", "step"])
    op.create_index(
        "ix_detector_snapshots_run_id_milestone_step", "detector_snapshots", ["run_id", "milestone", "step"]
    )
    op.create_index("ix_alerts_run_id_attempt_step", "alerts", ["run_id", "attempt", "step"])
    op.create_index("ix_alerts_run_id_attempt_cleared_step", "alerts", ["run_id", "attempt", "cleared_step"])


def downgrade() -> None:
    op.drop_index("ix_alerts_run_id_attempt_cleared_step", table_name="alerts")
    op.drop_index("ix_alerts_run_id_attempt_step", table_name="alerts")
    op.drop_index("ix_detector_snapshots_run_id_milestone_step", table_name="detector_snapshots")
    op.drop_index("ix_detector_snapshots_run_id_step", table_name="detector_snapshots")
    op.drop_index("ix_steps_unfolded", table_name="steps")
    op.create_index("ix_steps_closed_at_us_last_shard_at_us", "steps", ["closed_at_us", "last_shard_at_us"])
    op.drop_column("steps", "folded_shards")
