"""A job that measures an update: run a scorer twice with the weights before it, and once with those after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock.api.probes import ScorerRecord
from foreshock.api.records import to_json
from foreshock.diagnosis.update_noise import measure_update
from foreshock.rollouts import decode_scores
from foreshock.scorers import NOISE_FLOOR_VARIANT

if TYPE_CHECKING:
    from foreshock_probes.job_scoring import LeasedJob


def run_job(job: LeasedJob) -> dict[str, Any]:
    """Score the job's rollouts three times, and return the measurement as JSON."""
    scorer, after = job.job.scorers[0].scorer, job.job.candidates[0]
    weights = job.library.find(after, job.job.project)
    tasks = [
        job.task(ScorerRecord(scorer=scorer), "before.parquet"),
        job.task(ScorerRecord(scorer=scorer, variant=NOISE_FLOOR_VARIANT), "noise.parquet"),
        job.task(ScorerRecord(scorer=scorer), "after.parquet", weights=weights),
    ]
    scores = job.run_tasks(tasks, lambda task: decode_scores(Path(task.result).read_bytes()), "update")
    weights.check_unchanged()
    found = measure_update(
        job.rollouts(),
        *(each.log_probs for each in scores),
        steps=(job.job.step, after.step),
        scorer=scorer,
        fingerprints=(scores[0].fingerprint, scores[-1].fingerprint),
    )
    job.log(found.in_words())
    return dict(to_json(found))
