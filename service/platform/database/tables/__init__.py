"""Every table. Importing this package fills `Base.metadata`, which the migrations are compared with.

A new table: a module here, an import below, then
`python -m foreshock_service.platform.database.schema draft "what changes"`, which writes a migration into
`migrations/versions`. A test compares the migrated database with these classes.
"""

from __future__ import annotations

from foreshock_service.platform.database.tables.base import Base
from foreshock_service.platform.database.tables.measurements import (
    DueFindings,
    MeasurementStatistics,
    NewestMeasurement,
    Scalar,
    ShardLint,
    StepLint,
    StoredFinding,
    measurements,
)
from foreshock_service.platform.database.tables.platform import (
    ApiKey,
    AuditEntry,
    BackgroundJob,
    EndedSession,
    RetiredSecret,
)
from foreshock_service.platform.database.tables.probes import (
    Attribution,
    ExactDivergence,
    ExactShard,
    Lease,
    PolicyProbe,
    Probe,
    ProbeJob,
    ProbePolicy,
    Score,
    ScoreShard,
    StoredLayerComparison,
    StoredRouting,
    StoredWeightsSearch,
    Worker,
)
from foreshock_service.platform.database.tables.runs import (
    AnnouncedChange,
    Attempt,
    AttemptClient,
    Checkpoint,
    Deletion,
    FileRemoval,
    Run,
    RunSetup,
    Shard,
    ShardStatistics,
    Step,
)
from foreshock_service.platform.database.tables.watch import (
    AdviceAcknowledgement,
    AdviceDecision,
    Alert,
    DetectorSnapshot,
    DueReplay,
    Notification,
    RulesVersion,
    ScalarTail,
    TrainerProgress,
)

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
