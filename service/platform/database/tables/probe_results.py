"""Results of probe jobs that are documents: weights searches, comparisons by layer and of routed experts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index
from sqlalchemy.orm import Mapped, declared_attr, mapped_column

from foreshock_service.platform.database.tables.base import Base


class StoredResult(Base):
    """The result that one try of a job sent; it counts once that try completed its job."""

    __abstract__ = True

    @declared_attr.directive
    @classmethod
    def __table_args__(cls) -> tuple[Any, ...]:
        return (
            ForeignKeyConstraint(["run_id", "attempt", "step"], ["steps.run_id", "steps.attempt", "steps.step"]),
            Index(None, "run_id", "attempt", "step", "published_at_us"),
        )

    job_id: Mapped[str] = mapped_column(ForeignKey("probe_jobs.id"), primary_key=True)
    token: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    run_id: Mapped[str]
    attempt: Mapped[int]
    step: Mapped[int]
    document: Mapped[dict[str, Any]]
    published_at_us: Mapped[int | None]


class StoredWeightsSearch(StoredResult):
    """A weights search."""

    __tablename__ = "weights_searches"


class StoredLayerComparison(StoredResult):
    """A comparison by layer: a `foreshock.layer_divergence.LayerComparison`; `pair` is `compared/reference`."""

    __tablename__ = "layer_comparisons"

    pair: Mapped[str]


class StoredRouting(StoredResult):
    """A comparison of routed experts: a `RoutingBody` of `service/replay/results`; `pair` is `target/behaviour`."""

    __tablename__ = "routing_comparisons"

    pair: Mapped[str]
    rollouts: Mapped[int]
    tokens: Mapped[int]
    from_sample: Mapped[bool]
