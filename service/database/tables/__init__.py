"""Every table. Importing this package fills `Base.metadata`, which the migrations are compared with.

A new table: a module here, an import below, then a migration in `service/migrations/versions` (a test compares the
migrated database with these classes on both databases).
"""

from __future__ import annotations

from service.database.tables.base import Base
from service.database.tables.checkpoints import Checkpoint
from service.database.tables.keys import ApiKey
from service.database.tables.measurements import MeasurementStatistics, measurements
from service.database.tables.rollouts import Shard, ShardStatistics, Step
from service.database.tables.runs import Attempt, Run
from service.database.tables.scalars import Scalar

__all__ = [
    "ApiKey",
    "Attempt",
    "Base",
    "Checkpoint",
    "MeasurementStatistics",
    "Run",
    "Scalar",
    "Shard",
    "ShardStatistics",
    "Step",
    "measurements",
]
