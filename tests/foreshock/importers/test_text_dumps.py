"""Dumps of texts, written by verl and TRL themselves: scores are imported, and what is missing is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from foreshock.importers import FORMATS, ReadOptions, find_dumps

WRITE_VERL = """
import sys
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
for step in (1, 2):
    texts, scores, folder = ["a", "b", "c"], [0.25, 1.0, 0.0], sys.argv[1]
    RayPPOTrainer._write_generations(texts, texts, [None] * 3, scores, {"acc": [0, 1, 0]}, folder, step)
"""

WRITE_TRL = """
import sys
from pathlib import Path
from examples.trl.train import new_trainer
trainer = new_trainer(Path(sys.argv[1]), steps=2, use_vllm=False, log_completions=True)
trainer.train()
import json
print("LOG " + json.dumps(trainer.state.log_history))
"""


@pytest.mark.slow
def test_scores_of_verls_own_dump_are_imported(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE_VERL, str(tmp_path)], check=True, capture_output=True, timeout=300)
    dumps = find_dumps("verl", tmp_path)
    assert [dump.step for dump in dumps] == [1, 2]
    imported = FORMATS["verl"].read(dumps[1], ReadOptions())
    assert imported.batches == ()
    assert imported.scalars == {"critic/score/mean": pytest.approx(1.25 / 3)}
    assert "calculate_log_probs=True" in imported.notes[0]
    assert FORMATS["verl"].has_end(dumps[1].files[0])


@pytest.mark.slow
def test_means_of_trls_own_completions_equal_its_log(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WRITE_TRL, str(tmp_path)], check=True, capture_output=True, text=True, timeout=300
    )
    log = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("LOG "))[4:])
    dumps = find_dumps("trl", tmp_path / "checkpoints")
    assert [dump.step for dump in dumps] == [1, 2]
    for dump, entry in zip(dumps, log, strict=False):
        imported = FORMATS["trl"].read(dump, ReadOptions())
        assert imported.batches == ()
        names = {name for name in pq.read_schema(dump.files[0]).names if name not in ("step", "prompt", "completion")}
        assert names == {"reward_of_ones", "advantage"}
        own = entry["rewards/reward_of_ones/mean"]
        assert imported.scalars["completions/reward_of_ones/mean"] == pytest.approx(own, abs=1e-6)
        assert "ForeshockCallback" in imported.notes[0]
        assert FORMATS["trl"].has_end(dump.files[0])
