"""The run itself, for a few steps: a real service, a real vLLM, real training."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo.service_child import running_service
from examples.tiny_rl.record import RECORDED, RunRecord
from foreshock.client.reader import Reader
from foreshock.commands.queries import find_run, measured
from tests.paths import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

STEPS = 3

RELOADS = """
import sys
from pathlib import Path

import numpy as np

from examples.tiny_rl.model import load_model, new_model, save_model
from examples.tiny_rl.reload_check import ReloadCheck, StaleWeightsError
from examples.tiny_rl.sampler import Sampler
from examples.tiny_rl.task import encode
from examples.tiny_rl.trainer import Trainer, TrainerOptions

old, new, half = (Path(sys.argv[1]) / name for name in ("old", "new", "half"))
model = new_model(0)
save_model(model, old)
sampler = Sampler(old, seed=0)


def verdict(check):
    try:
        return f"follows {check.after_reload(model).slope:.3f}"
    except StaleWeightsError as error:
        return f"stale: {error}"


check = ReloadCheck(sampler, model, seed=0)
trainer = Trainer(model, TrainerOptions(learning_rate=3e-3))
for _ in range(5):
    trainer.step([encode("1+1=")] * 2, [encode(">2"), encode("++")], np.array([1.0, -1.0]))
save_model(model, new)
mixed = load_model(new)
mixed.lm_head.load_state_dict(load_model(old).lm_head.state_dict())
save_model(mixed, half)

print("none", verdict(check))
sampler.reload(half)
print("half", verdict(check))
sampler.reload(new)
print("full", verdict(check))
"""


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=500, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_service_receives_the_recorded_steps(tmp_path: Path) -> None:
    with running_service(tmp_path / "service") as (_, url), Reader(url) as reader:
        output = tmp_path / "run"
        run_python(
            "-m", "examples.tiny_rl.train", "--output", str(output), "--url", url, "--key", "few-steps",
            "--start-from", str(RECORDED / "checkpoints" / "step_0001"),
            "--steps", str(STEPS), "--prompts", "4", "--responses", "8",
        )  # fmt: skip
        record = RunRecord(output)
        scalars = record.scalars()
        run = find_run(reader, "few-steps")
        k3 = {step: values["k3_kl"] for step, values in measured(reader, run.id, "trainer/rollout", ["k3_kl"]).items()}
        checkpoints = reader.connection.get_json(f"/v1/runs/{run.id}/checkpoints")["items"]
    assert record.steps() == list(k3) == [1, 2, 3]
    assert list(k3.values()) == pytest.approx([scalars[step]["k3"] for step in k3], rel=1e-9)
    assert run.state == "finished"
    # It applies the advice, with its warm-up.
    assert run.initial_learning_rate is not None
    rates = [scalars[step]["lr"] for step in k3]
    assert rates == pytest.approx([run.initial_learning_rate * share for share in (1 / 3, 2 / 3, 1)])
    announced = {each["step"]: each["digest"] for each in checkpoints}
    assert announced == {each.step: each.digest for each in record.manifest().checkpoints}
    assert set(announced) == {1, STEPS}
    # The engine followed every update that was made.
    assert all(values["reload_mean_abs_d"] < 0.05 for values in scalars.values())


def test_reload_check_detects_old_weights(tmp_path: Path) -> None:
    results = dict(line.split(" ", 1) for line in run_python("-c", RELOADS, str(tmp_path)).splitlines() if " " in line)
    assert results["none"].startswith("stale:")
    assert results["half"].startswith("stale:")
    assert 0.8 < float(results["full"].split()[1]) < 1.2
