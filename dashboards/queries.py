"""The two kinds of queries of a panel: PromQL over time, SQL over training steps."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PROMETHEUS = DataSourceRef("prometheus", "foreshock-prometheus")
POSTGRESQL = DataSourceRef("grafana-postgresql-datasource", "foreshock-postgresql")


@dataclass(frozen=True)
class BuiltQuery(Builder[Dataquery]):
    """A query that is built already: what a panel's builder takes."""

    built: Dataquery

    def build(self) -> Dataquery:
        """Return the query."""
        return self.built


@dataclass(frozen=True, slots=True)
class PromQuery:
    """A PromQL expression; `table` asks for the newest value as rows instead of a series over time."""

    expression: str
    legend: str = ""
    table: bool = False

    datasource = PROMETHEUS

    def target(self, reference: str) -> Dataquery:
        """Return the query as Grafana's."""
        query = prometheus.Dataquery().ref_id(reference).datasource(PROMETHEUS).expr(self.expression)
        query = query.legend_format(self.legend or "__auto")
        return (query.format(PromQueryFormat.TABLE).instant() if self.table else query.range()).build()


@dataclass(frozen=True, slots=True)
class SqlQuery:
    """A PostgreSQL query that answers with a table; the reader's role sees curves only."""

    sql: str

    datasource = POSTGRESQL

    def target(self, reference: str) -> Dataquery:
        """Return the query as Grafana's; the SDK has no class of PostgreSQL's queries and leaves this one as it is."""
        return UnknownDataquery(
            {
                "refId": reference,
                "datasource": POSTGRESQL.to_json(),
                "rawSql": self.sql,
                "rawQuery": True,
                "editorMode": "code",
                "format": "table",
            }
        )


Query = PromQuery | SqlQuery
