"""Every table. Importing this package fills `Base.metadata`, which the migrations are compared with.

A new table: a module here, an import below, then
`python -m foreshock_service.platform.database.schema draft "what changes"`, which writes a migration into
`migrations/versions`. A test compares the migrated database with these classes.
"""

from __future__ import annotations

from foreshock_service.platform.database.tables.advice import AdviceAcknowledgement, AdviceDecision, TrainerProgress
from foreshock_service.platform.database.tables.alerts import Alert, DetectorSnapshot
from foreshock_service.platform.database.tables.audit import AuditEntry
from foreshock_service.platform.database.tables.base import Base
from foreshock_service.platform.database.tables.changes import AnnouncedChange, RunSetup
from foreshock_service.platform.database.tables.checkpoints import Checkpoint
from foreshock_service.platform.database.tables.detection import DueReplay, RulesVersion, ScalarTail
from foreshock_service.platform.database.tables.exact import ExactDivergence, ExactShard
from foreshock_service.platform.database.tables.findings import DueFindings, StoredFinding
from foreshock_service.platform.database.tables.jobs import BackgroundJob
from foreshock_service.platform.database.tables.keys import ApiKey, EndedSession, RetiredSecret
from foreshock_service.platform.database.tables.lint import ShardLint, StepLint
from foreshock_service.platform.database.tables.measurements import (
    MeasurementStatistics,
    NewestMeasurement,
    measurements,
)
from foreshock_service.platform.database.tables.notifications import Notification
from foreshock_service.platform.database.tables.policies import PolicyProbe, ProbePolicy
from foreshock_service.platform.database.tables.probe_results import (
    StoredLayerComparison,
    StoredRouting,
    StoredWeightsSearch,
)
from foreshock_service.platform.database.tables.probes import (
    Attribution,
    Lease,
    Probe,
    ProbeJob,
    Score,
    ScoreShard,
    Worker,
)
from foreshock_service.platform.database.tables.removals import Deletion, FileRemoval
from foreshock_service.platform.database.tables.rollouts import Shard, ShardStatistics, Step
from foreshock_service.platform.database.tables.runs import Attempt, AttemptClient, Run
from foreshock_service.platform.database.tables.scalars import Scalar

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
