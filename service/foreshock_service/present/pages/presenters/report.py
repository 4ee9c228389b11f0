"""The page of a run, or of one of its steps, as text for a terminal: what `foreshock report` prints.

The sentences, numbers and tables are those of the pages; a curve is a line of blocks.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from foreshock import page_addresses
from foreshock.api.attribution import AttributionRecord
from foreshock.api.diagnosis import Diagnosis
from foreshock.api.runs import RunRecord
from foreshock.commands.text import WIDTH, count, sparkline, table, wrap
from foreshock.diagnosis.wording import plural
from foreshock.model_kind import MODEL_KIND_NAMES
from foreshock_service.platform.database.tables import Run
from foreshock_service.present.pages.figures import Figure, Missing, drawing, overview
from foreshock_service.present.pages.figures.attribution import ATTRIBUTION_TITLE, share_in_words
from foreshock_service.present.pages.presenters import attribution as links
from foreshock_service.present.pages.presenters import figures
from foreshock_service.present.pages.presenters.findings import lint_of_step
from foreshock_service.present.pages.presenters.run import probes_part, run_page
from foreshock_service.present.pages.presenters.step import step_page
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.present.pages.rendering import number
from foreshock_service.runs.runs import get_run

SCREEN_LINES = 40
"""Lines of a usual terminal."""
_CURVE_WIDTH = 30
_MOST_PROBES = 5


def report_of_run(viewing: Viewing, run_id: str, step: int | None, whole: bool, origin: str) -> str:
    """Return one screen about a run; `whole`: all of its page; with `step`: the page of that step.

    On one screen each part of the diagnosis has three sentences, or fewer (at least one) if they do not fit; then the
    last curves are left out.
    Raises RunNotFound, RunDeleted and StepNotFound.
    """
    run, page = get_run(viewing.session, viewing.principal, run_id), run_page(viewing, run_id)
    panels = [panel for panel in figures.overview_panels(viewing, run, figures.Asked()) if panel.curve]
    head = _heading(viewing, run, page, panels)
    pages = f"Pages: {origin}{page_addresses.run_page_path(run.project, run.key)}"
    if step is not None:
        lines = [*head, "", *_diagnosis(page["diagnosis"]), *_of_step(viewing, run_id, step), "", pages]
        return "\n".join([*lines[:-1], f"{pages}/steps/{step}"])
    end = _advice(page["advice"], whole=whole)
    if whole:
        lines = [*head, "", *_diagnosis(page["diagnosis"]), *_curves(panels), *end, *_of_run(viewing, run_id, page)]
        return "\n".join([*lines, "", pages])
    end += ["", "Tables of steps, links, probes and alerts: --full", pages]
    every = len(panels)
    for most, kept in [(3, every), (2, every), *((1, fewer) for fewer in range(every, -1, -1))]:
        lines = [*head, "", *_diagnosis(page["diagnosis"], most), *_curves(panels[:kept]), *end]
        if len(lines) <= SCREEN_LINES:
            break
    return "\n".join(lines)


def _title(text: str, aside: str = "") -> str:
    """Return a section's title with a horizontal rule, and `aside` at its right end."""
    rule = "─" * max(3, WIDTH - len(text) - len(aside) - (2 if aside else 1))
    return f"{text} {rule} {aside}".rstrip()


def _heading(viewing: Viewing, run: Run, page: Mapping[str, Any], panels: Sequence[overview.Panel]) -> list[str]:
    record: RunRecord = page["run"]
    lines = [_title(f"Foreshock · {record.title}", record.state)]
    described = {"model": record.model, "trainer": record.trainer, "engine": record.engine, "on": record.hardware}
    parts = [f"{label} {value}" for label, value in described.items() if value]
    if record.model_kind is not None:
        parts.insert(1 if record.model else 0, MODEL_KIND_NAMES[record.model_kind])
    if record.initial_learning_rate is not None:
        parts.append(f"learning rate {record.initial_learning_rate:g}")
    lines += wrap(" · ".join(parts), "  ") if parts else []
    logged = (panel for panel in panels if panel.name != figures.ADVISED)
    steps = sorted({step for panel in logged for step, _ in panel.curve.points()})
    if not steps:
        return [*lines, "  no step is complete yet"]
    received = f", {plural(run.rollouts, 'rollout')}, {plural(run.tokens, 'token')}"
    if record.last_step is None:
        received = " of scalars, no rollouts yet"
    between = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    newest = f"{datetime.fromtimestamp(record.updated_at_us // 1_000_000, tz=UTC):%Y-%m-%d %H:%M UTC}"
    lines.append(f"  {plural(len(steps), 'step')} ({between}){received}; newest data {newest}")
    lines += wrap(page["incomplete"], "    ", "  ! ") if page["incomplete"] else []
    for fact in (page["coverage"], page["reference"]):
        lines += wrap(fact, "    ", "  ") if fact else []
    lines += wrap(page["out_of_date"], "    ", "  ! ") if page["out_of_date"] else []
    if record.last_step is not None:
        ignored = lint_of_step(viewing, run.id, record.last_step, page["attempt"]).ignored
        lines += wrap(f"step {record.last_step}: {ignored}", "    ", "  ") if ignored else []
    return lines


def _diagnosis(found: Diagnosis, most: int | None = None) -> list[str]:
    """Return the headline, in one line as everywhere, and `most` sentences of each part."""
    lines = [found.headline]
    for title, sentences in found.parts().items():
        lines += ["", f"  {title}"]
        for sentence in sentences[:most]:
            lines += wrap(sentence, "      ", "    · ")
        if most is not None and len(sentences) > most:
            lines += [f"      and {len(sentences) - most} more"]
    return lines


def _curves(panels: Sequence[overview.Panel]) -> list[str]:
    rows = []
    for panel in panels:
        values = [value for _, value in panel.curve.points()]
        line = sparkline(values, _CURVE_WIDTH, logarithmic=panel.logarithmic).ljust(_CURVE_WIDTH)
        limits = [f"{name} {number(level)}" for name, (level, _) in panel.lines.items() if name != "baseline"]
        rows.append([panel.name, line, number(values[-1]), ", ".join(limits)])
    return ["", *table(["", "all steps", "newest", ""], rows, left=(0, 1, 3))] if rows else []


def _advice(panel: Mapping[str, Any] | None, *, whole: bool) -> list[str]:
    """Return the advice; on one screen without the levers beside the rate that advise nothing."""
    if panel is None:
        return []
    advice = panel["advice"]
    words = f"scale {advice.advised_scale:g}; mode {advice.mode} ({panel['applied']}); revision {advice.revision}"
    lines = ["", *wrap(f"learning rate: {words}", "    ", "  ")]
    if panel["schedule"]:
        following = "" if advice.next_decay_step is None else f"; next at step {advice.next_decay_step}"
        lines += wrap(f"{panel['schedule']}{following}", "    ", "    ")
    for lever in (each for each in panel["levers"] if whole or each["is_advised"]):
        lines += wrap(f"{lever['title']}: {lever['sentence']}", "    ", "    ")
    return lines


def _of_run(viewing: Viewing, run_id: str, page: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for plot in page["figures"][1:]:
        if plot.title == ATTRIBUTION_TITLE:
            lines += _links(links.newest_attribution(viewing, run_id))
        else:
            lines += _figure(figures.run_figure(viewing, run_id, plot.id, figures.Asked()), over_steps=plot.over_steps)
    lines += ["", _title("Alerts", f"{page['alerts']} open" if page["alerts"] else "none open")]
    for episode in page["episodes"]:
        for alert in episode:
            about = f"step {alert.step}, {alert.rule}, {alert.state}"
            numbers = f"(value {number(alert.value)}, threshold {number(alert.threshold)})"
            lines.append(f"  {alert.severity:<8} {about} {numbers}")
            lines += wrap(alert.why, " " * 8) if alert.why else []
    waiting = [each for each in probes_part(viewing, run_id)["probes"] if each.state != "done"]
    for probe in waiting[:_MOST_PROBES]:
        reason = f": {probe.reason}" if probe.reason else ""
        lines += wrap(f"probe of step {probe.step}: {probe.state}{reason}", "    ", "  ! ")
    return lines


def _of_step(viewing: Viewing, run_id: str, step: int) -> list[str]:
    page = step_page(viewing, run_id, step)
    lines = _links(links.attribution_of(viewing, run_id, step))
    for plot in page["figures"]:
        if plot.title != ATTRIBUTION_TITLE:
            lines += _figure(figures.step_figure(viewing, run_id, step, plot.id), over_steps=False)
    if page["comparisons"]:
        lines += ["", _title(f"Measures of {page['comparisons'][0]}, step {step}")]
        rows = [
            [row.name, row.values[0].text, row.values[0].tone, row.values[0].interval or ""]
            for group in page["measures"]
            for row in group.rows
        ]
        lines += table(["", "", "", ""], rows, left=(0, 2, 3))[1:]
        lines += wrap(page["ranges_note"], "    ") + wrap(page["intervals_note"], "    ")
        lines += wrap(page["interval_warning"], "    ", "  ! ") if page["interval_warning"] else []
    if page["step_measures"]:
        lines += ["", _title(f"Rollouts of step {step}")]
        lines += table(["", ""], page["step_measures"])[1:]
    return lines


def _links(read: AttributionRecord | str | None) -> list[str]:
    """Return the links of a chain and the conclusions from them, or why there are none."""
    if not isinstance(read, AttributionRecord):
        return _figure(links.figure_of(read), over_steps=False)
    exact = read.exact_kl()
    rows = [
        [
            link.name,
            f"{number(exact[link.name])} (exact)" if link.name in exact else number(link.k3_kl),
            *map(number, (link.excess_k3_kl, link.mean_d, link.rms_d, link.max_abs_d)),
            share_in_words(link),
        ]
        for link in (*read.links, read.whole)
    ]
    scored = f"{count(read.rollouts)} rollouts, {count(read.tokens)} tokens"
    lines = ["", _title(f"{ATTRIBUTION_TITLE}, step {read.step}", scored)]
    lines += table(["link (π/μ)", "k3", "above floors", "mean d", "rms d", "max |d|", "share"], rows, left=(0, 6))
    for sentence in links.sentences_of(read):
        lines += wrap(sentence, "      ", "    → ")
    for sentence in links.notes_of(read):
        lines += wrap(sentence, "    ")
    return lines


def _figure(found: Figure | Missing, *, over_steps: bool) -> list[str]:
    """Return a figure as text: lines of blocks for its curves, or a table of its bars, and its words."""
    lines = ["", _title(found.title)]
    if isinstance(found, Missing):
        return [*lines, *wrap(found.why, "  ")]
    if over_steps:
        curves = [each for each in found.traces if "lines" in each.get("mode", "") and "hoverinfo" not in each]
        rows = [_curve_row(each, found.layout) for each in curves]
        lines += table(["", "", ""], rows, left=(0, 1))[1:] if rows else []
    elif not found.columns:
        names = found.traces[0]["x"]
        columns = [dict(zip(trace["x"], trace["y"], strict=True)) for trace in found.traces]
        header = [found.layout["xaxis"]["title"]["text"], *(str(trace["name"]) for trace in found.traces)]
        lines += table(header, [[name, *(number(column.get(name)) for column in columns)] for name in names])
    lines += wrap(found.summary, "  ")
    return [*lines, *wrap(found.caption, "    ")]


def _curve_row(trace: drawing.Json, layout: drawing.Json) -> list[str]:
    values = [float("nan") if value is None else value for value in trace["y"]]
    axis = layout.get(f"yaxis{str(trace.get('yaxis', 'y')).removeprefix('y')}", {})
    line = sparkline(values, _CURVE_WIDTH, logarithmic=axis.get("type") == "log").ljust(_CURVE_WIDTH)
    newest = next((value for value in reversed(trace["y"]) if value is not None), None)
    return [str(trace["name"]), line, number(newest)]
