"""Every table. Importing this package fills `Base.metadata`, which the migrations are compared with.

A new table: a module here, an import below, then `python -m service.database.schema draft "what changes"`, which writes
a migration into `service/migrations/versions` (a test compares the migrated database with these classes).
"""

from __future__ import annotations

from service.database.tables.advice import AdviceAcknowledgement, AdviceDecision, TrainerProgress
from service.database.tables.alerts import Alert, DetectorSnapshot
from service.database.tables.base import Base
from service.database.tables.checkpoints import Checkpoint
from service.database.tables.keys import ApiKey
from service.database.tables.lint import ShardLint, StepLint
from service.database.tables.measurements import MeasurementStatistics, measurements
from service.database.tables.probes import Attribution, Lease, Probe, ProbeJob, Score, ScoreShard, Worker
from service.database.tables.rollouts import Shard, ShardStatistics, Step
from service.database.tables.runs import Attempt, Run
from service.database.tables.scalars import Scalar

__all__ = [
    "AdviceAcknowledgement",
    "AdviceDecision",
    "Alert",
    "ApiKey",
    "Attempt",
    "Attribution",
    "Base",
    "Checkpoint",
    "DetectorSnapshot",
    "Lease",
    "MeasurementStatistics",
    "Probe",
    "ProbeJob",
    "Run",
    "Scalar",
    "Score",
    "ScoreShard",
    "Shard",
    "ShardLint",
    "ShardStatistics",
    "Step",
    "StepLint",
    "TrainerProgress",
    "Worker",
    "measurements",
]
