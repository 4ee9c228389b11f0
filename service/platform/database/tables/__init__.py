"""Every table. Importing this package fills `Base.metadata`, which the migrations are compared with.

A new table: a module here, an import below, then `python -m service.platform.database.schema draft "what changes"`,
which writes a migration into `migrations/versions`. A test compares the migrated database with these classes.
"""

from __future__ import annotations

from service.platform.database.tables.advice import AdviceAcknowledgement, AdviceDecision, TrainerProgress
from service.platform.database.tables.alerts import Alert, DetectorSnapshot
from service.platform.database.tables.audit import AuditEntry
from service.platform.database.tables.base import Base
from service.platform.database.tables.changes import AnnouncedChange, RunSetup
from service.platform.database.tables.checkpoints import Checkpoint
from service.platform.database.tables.detection import DueReplay, RulesVersion, ScalarTail
from service.platform.database.tables.exact import ExactDivergence, ExactShard
from service.platform.database.tables.findings import DueFindings, StoredFinding
from service.platform.database.tables.jobs import BackgroundJob
from service.platform.database.tables.keys import ApiKey, EndedSession, RetiredSecret
from service.platform.database.tables.lint import ShardLint, StepLint
from service.platform.database.tables.measurements import MeasurementStatistics, NewestMeasurement, measurements
from service.platform.database.tables.notifications import Notification
from service.platform.database.tables.policies import PolicyProbe, ProbePolicy
from service.platform.database.tables.probe_results import StoredLayerComparison, StoredRouting, StoredWeightsSearch
from service.platform.database.tables.probes import Attribution, Lease, Probe, ProbeJob, Score, ScoreShard, Worker
from service.platform.database.tables.removals import Deletion, FileRemoval
from service.platform.database.tables.rollouts import Shard, ShardStatistics, Step
from service.platform.database.tables.runs import Attempt, AttemptClient, Run
from service.platform.database.tables.scalars import Scalar

__all__ = [
    "AdviceAcknowledgement",
    "AdviceDecision",
    "Alert",
    "AnnouncedChange",
    "ApiKey",
    "Attempt",
    "AttemptClient",
    "Attribution",
    "AuditEntry",
    "BackgroundJob",
    "Base",
    "Checkpoint",
    "Deletion",
    "DetectorSnapshot",
    "DueFindings",
    "DueReplay",
    "EndedSession",
    "ExactDivergence",
    "ExactShard",
    "FileRemoval",
    "Lease",
    "MeasurementStatistics",
    "NewestMeasurement",
    "Notification",
    "PolicyProbe",
    "Probe",
    "ProbeJob",
    "ProbePolicy",
    "RetiredSecret",
    "RulesVersion",
    "Run",
    "RunSetup",
    "Scalar",
    "ScalarTail",
    "Score",
    "ScoreShard",
    "Shard",
    "ShardLint",
    "ShardStatistics",
    "Step",
    "StepLint",
    "StoredFinding",
    "StoredLayerComparison",
    "StoredRouting",
    "StoredWeightsSearch",
    "TrainerProgress",
    "Worker",
    "measurements",
]
