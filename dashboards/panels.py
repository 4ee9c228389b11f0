"""The panels that the dashboards are made of, written as Grafana's JSON by its own builders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar, Unpack

from grafana_foundation_sdk.builders import common, stat, table, timeseries, trend
from grafana_foundation_sdk.builders.dashboard import DashboardLink, FieldColor, ThresholdsConfig
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    FieldTextAlignment,
    GraphDrawStyle,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    ScaleDistribution,
    SortOrder,
    TableCellHeight,
    TooltipDisplayMode,
    VisibilityMode,
)

from dashboards.queries import BuiltQuery, PromQuery, Query
from foreshock.healthy_ranges import HealthyRange

# The service's address as its users know it: a label of its own metric, so that no dashboard is edited to install it.
SERVICE_URL = "foreshock"
_ROOT = f"${{{SERVICE_URL}:raw}}"

Builder = timeseries.Panel | trend.Panel | stat.Panel | table.Panel
Drawn = TypeVar("Drawn", timeseries.Panel, trend.Panel)


@dataclass(frozen=True, slots=True)
class Level:
    """From `at` on, `colour`; None: from the beginning."""

    at: float | None
    colour: str


@dataclass(frozen=True, slots=True)
class Link:
    """Where a click on a value leads: a page of the service; `path` may name labels and fields of the value."""

    title: str
    path: str

    def builder(self) -> DashboardLink:
        """Return the link as Grafana's."""
        return DashboardLink(self.title).url(_ROOT + self.path).target_blank(True)


# Of a series or a row of Prometheus, which has the run's id as a label or column.
RUN_OF_SERIES = Link("Open the run's page", "/runs/${__field.labels.run}")
RUN_OF_ROW = Link("Open the run's page", "/runs/${__data.fields.run}")
# Of a point over steps, in a dashboard that has the variable `run`.
STEP_OF_POINT = Link("Open the step's page", "/runs/${run:raw}/steps/${__data.fields.step}")


def levels_of(known: HealthyRange) -> tuple[Level, ...]:
    """Return green, yellow and red by the thresholds of a range whose direction is "above"."""
    thresholds = ((known.warning, "yellow"), (known.critical, "red"))
    return (Level(None, "green"), *(Level(at, colour) for at, colour in thresholds if at is not None))


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `kind` "trend" draws over the numeric column `step`, "timeseries" over time.

    `link`: where a click on a value leads; a point over steps leads to its step.
    """

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
    link: Link | None = None

    def build(self, identifier: int, x: int, y: int) -> models.Panel:
        """Return the panel at its place of the grid.

        Raises:
            ValueError: The queries ask different data sources, which one panel cannot.
        """
        datasources = {query.datasource.uid: query.datasource for query in self.queries}
        if len(datasources) != 1:
            raise ValueError(f"panel {self.title!r} mixes datasources")
        (datasource,) = datasources.values()
        panel = self._panel()
        panel.id(identifier).title(self.title).description(self.description).datasource(datasource)
        panel.grid_pos(models.GridPos(self.height, self.width, x, y))
        panel.unit(self.unit).no_value("no data yet").color_scheme(self._colours())
        panel.targets([BuiltQuery(query.target(chr(ord("A") + index))) for index, query in enumerate(self.queries)])
        if self.minimum is not None:
            panel.min(self.minimum)
        if self.maximum is not None:
            panel.max(self.maximum)
        if self.levels:
            steps = [models.Threshold(level.at, level.colour) for level in self.levels]
            panel.thresholds(ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        link = STEP_OF_POINT if self.kind == "trend" else self.link
        if link is not None:
            panel.data_links([link.builder()])
        if self.hidden_columns:
            hidden = {"excludeByName": dict.fromkeys(self.hidden_columns, True)}
            panel.with_transformation(models.DataTransformerConfig("merge", options={}))
            panel.with_transformation(models.DataTransformerConfig("organize", options=hidden))
        return panel.build()

    def _colours(self) -> FieldColor:
        by_level = self.kind == "stat" and self.levels
        mode = models.FieldColorModeId.THRESHOLDS if by_level else models.FieldColorModeId.PALETTE_CLASSIC
        return FieldColor().mode(mode)

    def _panel(self) -> Builder:
        match self.kind:
            case "stat":
                return (
                    stat.Panel()
                    .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
                    .color_mode(BigValueColorMode.BACKGROUND)
                    .graph_mode(BigValueGraphMode.AREA)
                    .text_mode(BigValueTextMode.AUTO)
                )
            case "table":
                return (
                    table.Panel()
                    .show_header(True)
                    .cell_height(TableCellHeight.SM)
                    .align(FieldTextAlignment.AUTO)
                    .inspect(False)
                )
            case "trend":
                return self._drawn(trend.Panel().x_field("step"))
            case "timeseries":
                return self._drawn(timeseries.Panel())

    def _drawn(self, panel: Drawn) -> Drawn:
        scale = common.ScaleDistributionConfig().type(ScaleDistribution.LINEAR)
        if self.logarithmic:
            scale = common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10)
        style = GraphThresholdsStyleMode.AREA if self.levels else GraphThresholdsStyleMode.OFF
        panel.draw_style(GraphDrawStyle.LINE).line_width(2).fill_opacity(0).show_points(VisibilityMode.AUTO)
        panel.span_nulls(True).scale_distribution(scale)
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
        panel.legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        return panel


class PanelOptions(TypedDict, total=False):
    """The fields of a panel that have a default."""

    width: int
    height: int
    unit: str
    logarithmic: bool
    minimum: float
    maximum: float
    levels: Sequence[Level]
    link: Link


def over_time(title: str, expression: str, legend: str, description: str, **options: Unpack[PanelOptions]) -> Panel:
    """Return a panel of one expression of Prometheus over time."""
    return Panel(title, "timeseries", (PromQuery(expression, legend),), description, **options)


def latest(title: str, expression: str, legend: str, description: str, **options: Unpack[PanelOptions]) -> Panel:
    """Return a panel of the newest values of one expression of Prometheus."""
    return Panel(title, "stat", (PromQuery(expression, legend),), description, **options)
