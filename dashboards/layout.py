"""Dashboards: rows of panels, the choices at the top, and links to the other dashboards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import SERVICE_URL, Panel
from dashboards.queries import PromQuery, SqlQuery

GRID_WIDTH = 24
TAG = "foreshock"


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
    hidden: bool = False
    several: bool = False
    """Several can be chosen; all are, at first."""

    def build(self) -> models.VariableModel:
        """Return the variable as Grafana's."""
        if isinstance(self.query, SqlQuery):
            query: dict[str, object] | str = self.query.sql
        else:
            query = {"qryType": 1, "query": self.query.expression, "refId": "variable"}
        hide = models.VariableHide.HIDE_VARIABLE if self.hidden else models.VariableHide.DONT_HIDE
        built = (
            builders.QueryVariable(self.name)
            .label(self.label)
            .datasource(self.query.datasource)
            .query(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.DISABLED)
            .hide(hide)
            .multi(self.several)
            .include_all(self.several)
        )
        if self.several:
            every = models.VariableOption(selected=True, text="All", value="$__all")
            built = built.all_value(".*").current(every)
        return built.build()


SERVICE_ADDRESS = Variable(
    SERVICE_URL, "Service", PromQuery("label_values(foreshock_build_info, public_url)"), hidden=True
)


@dataclass(frozen=True)
class BuiltVariable(Builder[models.VariableModel]):
    """A variable that is built already: what a dashboard's builder takes."""

    built: models.VariableModel

    def build(self) -> models.VariableModel:
        """Return the variable."""
        return self.built


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A whole dashboard; panels flow from left to right and wrap at the grid's width.

    `page`: title and path of the page of the service that shows the same; the path may name variables.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    page: tuple[str, str]
    variables: Sequence[Variable] = field(default_factory=tuple)
    refresh: str = "30s"
    since: str = "now-24h"

    def build(self) -> models.Dashboard:
        """Return the dashboard as Grafana's."""
        built = (
            builders.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags([TAG])
            .readonly()
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .timezone("utc")
            .refresh(self.refresh)
            .time(self.since, "now")
            .version(1)
            .variables([BuiltVariable(each.build()) for each in (SERVICE_ADDRESS, *self.variables)])
            .links([_link_to_page(*self.page), _link_to_other_dashboards()])
            .build()
        )
        built.panels = self._panels()
        return built

    def render(self) -> dict[str, Any]:
        """Return Grafana's JSON as a dictionary."""
        document: dict[str, Any] = json.loads(json.dumps(self.build(), cls=JSONEncoder))
        return document

    def _panels(self) -> list[models.Panel | models.RowPanel]:
        built: list[models.Panel | models.RowPanel] = []
        y = 0
        for row in self.rows:
            place = models.GridPos(h=1, w=GRID_WIDTH, x=0, y=y)
            built.append(models.RowPanel(title=row.title, collapsed=False, id_val=len(built) + 1, grid_pos=place))
            y += 1
            x = tallest = 0
            for panel in row.panels:
                if x + panel.width > GRID_WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                built.append(panel.build(len(built) + 1, x, y))
                x += panel.width
                tallest = max(tallest, panel.height)
            y += tallest
        return built


def _link_to_page(title: str, path: str) -> builders.DashboardLink:
    url = f"${{{SERVICE_URL}:raw}}{path}"
    return builders.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url).target_blank(True)


def _link_to_other_dashboards() -> builders.DashboardLink:
    link = builders.DashboardLink("Foreshock").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).include_vars(True).keep_time(True)
