"""The presenter of hardware: the mismatch by hardware and configuration of the runs, and the workers that replay."""

from __future__ import annotations

from collections import defaultdict

from foreshock.diagnosis.health import PooledMeasure
from foreshock.page_addresses import run_page_path
from foreshock.ranges import verdict_of
from foreshock_service.present.pages.formatting import VERDICT_TONES, number
from foreshock_service.present.pages.list_models import ConfigurationRow, HardwarePage, HardwareRow
from foreshock_service.present.pages.presenters.viewing import Viewing
from foreshock_service.replay.hardware.service import hardware_of
from foreshock_service.runs.health.service import pooled_mismatch
from foreshock_service.runs.runs.schemas import RunFilter, RunRead
from foreshock_service.runs.runs.service import list_runs

MOST_RUNS = 200


def hardware_page(viewing: Viewing) -> HardwarePage:
    """Return the newest runs by hardware × configuration, and the accelerators of the workers."""
    runs = list_runs(viewing.session, RunFilter(viewing.principal.projects(None)), None, MOST_RUNS).items
    pooled = pooled_mismatch(viewing.session, [run.id for run in runs])
    groups: defaultdict[tuple[str, str], list[RunRead]] = defaultdict(list)
    for run in runs:
        names = [each or "not declared" for each in (run.engine, run.trainer, run.model)]
        groups[run.hardware or "not declared", ", ".join(names)].append(run)
    rows = [_configuration(*key, groups[key], pooled) for key in sorted(groups)]
    hardware = hardware_of(viewing.session, viewing.principal)
    return HardwarePage(
        configurations=[row for _, row in sorted(rows, key=lambda each: -each[0])],
        accelerators=[
            HardwareRow(
                each.accelerator, ", ".join(each.devices) or "none seen",
                each.workers, each.queued_jobs, each.running_jobs, each.scores,
            )
            for each in hardware.accelerators
        ],
        accelerators_left_out=hardware.accelerators_left_out,
    )  # fmt: skip


def _configuration(
    hardware: str, configuration: str, runs: list[RunRead], pooled: dict[str, PooledMeasure]
) -> tuple[float, ConfigurationRow]:
    """Return the largest k3 of these runs, −1 if none is measured, and the row."""
    means = {run.id: pooled[run.id].mean for run in runs if run.id in pooled}
    worst = max(runs, key=lambda run: means.get(run.id, -1.0))
    low, high = min(means.values(), default=None), max(means.values(), default=None)
    text = "not measured" if low is None else number(low) if low == high else f"{number(low)} to {number(high)}"
    tone = "" if high is None else VERDICT_TONES[verdict_of("k3_kl", high, worst.model_kind)]
    address = run_page_path(worst.project, worst.key)
    row = ConfigurationRow(hardware, configuration, len(runs), text, tone, worst.name or worst.key, address)
    return -1.0 if high is None else high, row
