"""A job of the doctor: the same search as `foreshock doctor FILE`, with the announced checkpoints as candidates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foreshock.api.leases import JobWeightsRecord
from foreshock.api.records import to_json
from foreshock.doctor import Budget, CannotTryError, examine
from foreshock.errors import WeightsError
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel, write_result

if TYPE_CHECKING:
    from foreshock_probes.job_scoring import LeasedJob

PART = "foreshock_probes.doctor.job:run_part"
WITHOUT_ADAPTER = "the base model without the adapter"


def run_job(job: LeasedJob) -> dict[str, Any]:
    """Examine the job's rollouts in the engine of its scorer, and return the report as JSON."""
    announced = _name(job.job.checkpoint)
    weights, unusable = {announced: job.weights}, {}
    for each in job.job.candidates:
        try:
            weights[_name(each)] = job.library.find(each, job.job.project)
        except WeightsError as error:
            unusable[_name(each)] = str(error)
    folders = {name: each.announced for name, each in weights.items()}
    if job.weights.adapter is not None:
        folders[WITHOUT_ADAPTER] = job.weights.folder
    given = {
        "folders": {name: str(folder) for name, folder in folders.items()},
        "bases": {name: str(each.folder) for name, each in weights.items() if each.adapter is not None},
        "versions": {_name(each): _version(each) for each in (job.job.checkpoint, *job.job.candidates) if not each.run},
        "announced": announced,
        "unusable": unusable,
        "budget_seconds": job.job.budget_seconds,
    }
    arguments = {"given": json.dumps(given), "doing": str(job.doing_file)}
    task = job.task(job.job.scorers[0], "report.json", PART, arguments)
    report: dict[str, Any]
    (report,) = job.run_tasks([task], lambda each: json.loads(each.result.read_bytes()), "doctor")
    for used in weights.values():
        used.check_unchanged()
    return report


def run_part(request: ScoreRequest, warm: WarmModel, report: Report) -> None:
    """Examine the rollouts as a task of an engine of torch; write the current experiment to the file `doing`.

    Raises UnsupportedScoreError if no experiment is possible; another try would fail too.
    """
    from foreshock_probes.doctor.experimenter import TorchExperimenter

    given, doing = json.loads(request.arguments["given"]), Path(request.arguments["doing"])

    def log(line: str) -> None:
        doing.write_text(line, "utf-8")
        report(0)

    batch = request.rollouts
    batch = batch.select(np.flatnonzero(batch.response_lengths > 0).tolist())
    announced = dict.fromkeys(("rollout", "trainer"), given["announced"])
    folders, bases = ({name: Path(path) for name, path in given[kind].items()} for kind in ("folders", "bases"))
    try:
        log("loading the weights")
        experimenter = TorchExperimenter(batch, folders, announced, given["versions"], given["unusable"], bases)
        found = examine(
            batch,
            experimenter,
            Budget(seconds=given["budget_seconds"]),
            log,
            in_float32=given.get("in_float32", False),
        )
    except CannotTryError as error:
        raise UnsupportedScoreError(f"the doctor cannot try anything: {error}") from error
    write_result(json.dumps(to_json(found)).encode(), request.result)


def _name(checkpoint: JobWeightsRecord) -> str:
    return f"step {checkpoint.step}{f' of {checkpoint.run}' if checkpoint.run else ''}"


def _version(checkpoint: JobWeightsRecord) -> int:
    return checkpoint.step if checkpoint.weights_version is None else checkpoint.weights_version
