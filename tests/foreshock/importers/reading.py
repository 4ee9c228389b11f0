"""The recorded dumps, and what they must give."""

import json
from typing import Any

import numpy as np

from foreshock.importers import FORMATS, ImportedStep, ReadOptions, find_dumps
from foreshock.measures.comparison import measure_step
from foreshock.rollouts import RolloutBatch
from tests.foreshock.importers.make_dumps import DUMPS, lists, rollouts_of

PICKLES = ReadOptions(allow_pickle=True)
FOLDERS = {"prime-rl": "prime-rl", "nemo-rl": "nemo-rl", "slime": "slime", "miles": "slime", "skyrl": "skyrl"}
"""The format of each folder of dumps."""


def read(folder: str, step: int, options: ReadOptions = PICKLES) -> ImportedStep:
    """Read a recorded dump."""
    name = FOLDERS[folder]
    (dump,) = [dump for dump in find_dumps(name, DUMPS / folder) if dump.step == step]
    return FORMATS[name].read(dump, options)


def figures(folder: str, step: int) -> dict[str, float]:
    """Return what the framework's own formulas give."""
    found: dict[str, float] = json.loads((DUMPS / "figures.json").read_text())[folder][str(step)]
    return found


def measures(step: ImportedStep) -> dict[str, float]:
    """Return the measures of all shards together."""
    batch = RolloutBatch.concat(step.batches)
    return dict(measure_step(batch).comparisons["trainer/rollout"].statistics.measures())


def rows_of(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Return the rollouts as lists, with NaN where no token was sampled."""
    rows = []
    for row in range(batch.num_rollouts):
        place = slice(*batch.response_offsets[row : row + 2])
        sampled = batch.generated[place]

        def of(values: Any, place: slice = place, sampled: Any = sampled) -> list[float]:
            return list(np.where(sampled, values[place], 0.0).tolist())

        rows.append(
            {
                "prompt": batch.prompt_token_ids[slice(*batch.prompt_offsets[row : row + 2])].tolist(),
                "response": batch.response_token_ids[place].tolist(),
                "mask": sampled.astype(int).tolist(),
                "mu": of(batch.rollout_log_probs),
                "pi": of(batch.trainer_log_probs),
            }
        )
    return rows


def recorded(step: int) -> list[dict[str, Any]]:
    """Return the rollouts from which the dumps of a step were written, in the form of `rows_of`."""
    rows = []
    for row in lists(rollouts_of(step)):
        sampled = np.asarray(row["mask"]) == 1
        values = {name: np.where(sampled, row[name], 0.0).tolist() for name in ("mu", "pi")}
        rows.append({**{name: row[name] for name in ("prompt", "response", "mask")}, **values})
    return rows
