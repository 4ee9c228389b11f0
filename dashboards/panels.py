"""Typed builders for the few Grafana panels that the dashboards are made of.

Plain dataclasses that render to Grafana's JSON (schema version 41, Grafana 12): what a dashboard here needs is small,
and a reader sees the whole of it on one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from foreshock.ranges import HealthyRange

SCHEMA_VERSION = 41
GRID_WIDTH = 24

PROMETHEUS = {"type": "prometheus", "uid": "foreshock-prometheus"}
POSTGRESQL = {"type": "grafana-postgresql-datasource", "uid": "foreshock-postgresql"}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PromQuery:
    """A PromQL expression; `table` asks for the newest value as rows instead of a series over time."""

    expression: str
    legend: str = ""
    table: bool = False

    datasource = PROMETHEUS

    def target(self, reference: str) -> Json:
        form = {"format": "table", "instant": True} if self.table else {"range": True}
        return {
            "refId": reference,
            "datasource": PROMETHEUS,
            "expr": self.expression,
            "legendFormat": self.legend or "__auto",
            **form,
        }


@dataclass(frozen=True, slots=True)
class SqlQuery:
    """A PostgreSQL query that answers with a table; the reader's role sees curves only."""

    sql: str

    datasource = POSTGRESQL

    def target(self, reference: str) -> Json:
        return {
            "refId": reference,
            "datasource": POSTGRESQL,
            "rawSql": self.sql,
            "rawQuery": True,
            "editorMode": "code",
            "format": "table",
        }


Query = PromQuery | SqlQuery


@dataclass(frozen=True, slots=True)
class Level:
    """From `at` on, `colour`; None: from the beginning."""

    at: float | None
    colour: str


def levels_of(known: HealthyRange) -> tuple[Level, ...]:
    """Return green, yellow and red by the thresholds of a range whose direction is "above"."""
    thresholds = ((known.warning, "yellow"), (known.critical, "red"))
    return (Level(None, "green"), *(Level(at, colour) for at, colour in thresholds if at is not None))


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `kind` "trend" draws over the numeric column `step`, "timeseries" over time."""

    title: str
    kind: Literal["timeseries", "trend", "stat", "table"]
    queries: Sequence[Query]
    description: str
    width: int = 12
    height: int = 9
    unit: str = "none"
    logarithmic: bool = False
    minimum: float | None = None
    maximum: float | None = None
    levels: Sequence[Level] = ()
    hidden_columns: Sequence[str] = ()

    def render(self, identifier: int, x: int, y: int) -> Json:
        """Return the panel at its place of the grid."""
        datasources = {query.datasource["uid"] for query in self.queries}
        if len(datasources) != 1:
            raise ValueError(f"panel {self.title!r} mixes datasources")
        return {
            "id": identifier,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": self.queries[0].datasource,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [query.target(chr(ord("A") + index)) for index, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._options(),
            "transformations": self._transformations(),
        }

    def _defaults(self) -> Json:
        defaults: Json = {"unit": self.unit, "color": {"mode": "palette-classic"}, "noValue": "no data yet"}
        if self.minimum is not None:
            defaults["min"] = self.minimum
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self.levels:
            steps = [{"color": level.colour, "value": level.at} for level in self.levels]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
            if self.kind == "stat":
                defaults["color"] = {"mode": "thresholds"}
        if self.kind in ("timeseries", "trend"):
            scale = {"type": "log", "log": 10} if self.logarithmic else {"type": "linear"}
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 2,
                "fillOpacity": 0,
                "showPoints": "auto",
                "spanNulls": True,
                "scaleDistribution": scale,
                "thresholdsStyle": {"mode": "area" if self.levels else "off"},
            }
        return defaults

    def _options(self) -> Json:
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        tooltip = {"mode": "multi", "sort": "desc"}
        match self.kind:
            case "trend":
                return {"xField": "step", "legend": legend, "tooltip": tooltip}
            case "timeseries":
                return {"legend": legend, "tooltip": tooltip}
            case "stat":
                reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
                return {"reduceOptions": reduce, "colorMode": "background", "graphMode": "area", "textMode": "auto"}
            case "table":
                return {"showHeader": True, "cellHeight": "sm"}

    def _transformations(self) -> list[Json]:
        if not self.hidden_columns:
            return []
        hidden = dict.fromkeys(self.hidden_columns, True)
        return [{"id": "merge", "options": {}}, {"id": "organize", "options": {"excludeByName": hidden}}]


@dataclass(frozen=True, slots=True)
class Row:
    """A heading above the panels that follow it."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the dashboard, filled by a query."""

    name: str
    label: str
    query: SqlQuery | PromQuery
    several: bool = False

    def render(self) -> Json:
        if isinstance(self.query, SqlQuery):
            query: Json | str = self.query.sql
        else:
            query = {"qryType": 1, "query": self.query.expression, "refId": "variable"}
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": self.query.datasource,
            "query": query,
            "definition": query if isinstance(query, str) else query["query"],
            "refresh": 2,
            "multi": self.several,
            "includeAll": self.several,
            "sort": 0,
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A whole dashboard; panels flow from left to right and wrap at the grid's width."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = field(default_factory=tuple)
    refresh: str = "30s"
    since: str = "now-24h"

    def render(self) -> Json:
        """Grafana's JSON."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["foreshock"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "timezone": "utc",
            "refresh": self.refresh,
            "time": {"from": self.since, "to": "now"},
            "templating": {"list": [variable.render() for variable in self.variables]},
            "annotations": {"list": []},
            "links": [_links_to_other_dashboards()],
            "panels": self._panels(),
        }

    def _panels(self) -> list[Json]:
        rendered: list[Json] = []
        y = 0
        for row in self.rows:
            place = {"x": 0, "y": y, "w": GRID_WIDTH, "h": 1}
            heading = {"type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
            rendered.append({"id": len(rendered) + 1, **heading})
            y += 1
            x = tallest = 0
            for panel in row.panels:
                if x + panel.width > GRID_WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                rendered.append(panel.render(len(rendered) + 1, x, y))
                x += panel.width
                tallest = max(tallest, panel.height)
            y += tallest
        return rendered


def _links_to_other_dashboards() -> Json:
    return {
        "type": "dashboards",
        "title": "Foreshock",
        "tags": ["foreshock"],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }
