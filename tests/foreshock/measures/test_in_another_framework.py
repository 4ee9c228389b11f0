"""The code for other frameworks on the page of measures runs, in two ranks that exchange tensors."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foreshock.measures import StepMeasurement, measure_step
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_log_probs
from tests.paths import REPOSITORY

ROLLOUTS, WIDTH = 12, 30

# The trainer's variables on each rank before the code of the page, and its results after it.
BEFORE = """
import pickle, sys
import torch
import torch.distributed

folder, rank = sys.argv[1], int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
tensors = torch.load(f"{folder}/tensors.pt")
rows = slice(6 * rank, 6 * rank + 6)
responses, response_mask, rollout_log_probs, old_log_probs, prompt_ids = (tensor[rows] for tensor in tensors)
"""
AFTER = """
with open(f"{folder}/{rank}", "wb") as file:
    pickle.dump((metrics, of_step), file)
torch.distributed.destroy_process_group()
"""


def whole_batch() -> RolloutBatch:
    """Return the rollouts of both ranks as flat arrays."""
    random = np.random.default_rng(5)
    offsets = np.concatenate([[0], np.cumsum(random.integers(1, WIDTH, ROLLOUTS))])
    target, behaviour = random_log_probs(random, int(offsets[-1]))
    return RolloutBatch.from_arrays(
        [f"rollout {row}" for row in range(ROLLOUTS)], [], np.zeros(ROLLOUTS + 1, np.int64),
        random.integers(0, 1000, int(offsets[-1])), offsets, response_mask=np.ones(int(offsets[-1]), np.uint8),
        rollout_log_probs=behaviour, trainer_log_probs=target, group_ids=[str(row // 2) for row in range(ROLLOUTS)],
    )  # fmt: skip


def measures_of(measurement: StepMeasurement) -> dict[str, float]:
    return measurement.step.measures() | measurement.comparisons["trainer/rollout"].measures()


def assert_alike(found: dict[str, float], expected: dict[str, float]) -> None:
    """Assert equality except for the last digits, which differ between machine code and numpy."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        clustered = name.endswith(("_low", "_high"))
        assert found[name] == pytest.approx(value, rel=1e-7 if clustered else 1e-9, abs=1e-12, nan_ok=True), name


@pytest.mark.slow
def test_code_of_the_page_measures_padded_tensors_and_folds_ranks(tmp_path: Path) -> None:
    import torch

    code = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "measures.md").read_text(), re.DOTALL)
    assert len(code) == 2
    batch = whole_batch()
    inside = np.arange(WIDTH) >= WIDTH - batch.response_lengths[:, None]
    columns = []
    for values in (batch.response_token_ids, batch.generated, batch.rollout_log_probs, batch.trainer_log_probs):
        assert values is not None
        padded = np.zeros(inside.shape, np.float32 if values.dtype == np.float32 else np.int64)
        padded[inside] = values
        columns.append(torch.from_numpy(padded))
    torch.save([*columns, torch.arange(ROLLOUTS) // 2], tmp_path / "tensors.pt")
    (tmp_path / "rank.py").write_text("\n".join([BEFORE, *code, AFTER]))
    command = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=REPOSITORY) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    whole = measures_of(measure_step(batch))
    for rank in range(2):
        metrics, of_step = pickle.loads((tmp_path / str(rank)).read_bytes())
        alone = measure_step(batch.select(range(6 * rank, 6 * rank + 6)))
        assert_alike(metrics, measures_of(alone))
        assert_alike(measures_of(of_step), whole)
