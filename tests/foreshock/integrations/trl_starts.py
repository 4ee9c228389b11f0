"""Starts of a real TRL trainer without vLLM: ranks, resumes, a second `train()`. Prints each rank's results as JSON.

python -m tests.foreshock.integrations.trl_starts FOLDER SCENARIO
"""

import faulthandler
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from examples.trl.train import new_trainer, reward_of_ones
from foreshock.client.client import Client
from foreshock.integrations.trl import ADVICE_FILE, ForeshockCallback
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.length_decay import Point
from tests.foreshock.integrations.operators import halve_learning_rate

CHECKPOINT_AFTER = 2
WANTED_STEP = 3
RATE = 1e-5
HANGS_AFTER_SECONDS = 300.0

folder, scenario = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ.get("RANK", "0"))


def trainer_of(steps: int, **arguments: Any) -> Any:
    """Return a trainer with tiny batches and a constant learning rate, so low that the advice never lowers it."""
    small = {"learning_rate": RATE, "per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4,
             "lr_scheduler_type": "constant"}  # fmt: skip
    return new_trainer(folder, steps=steps, use_vllm=False, **{**small, **arguments})


def connected(trainer: Any, **arguments: Any) -> Any:
    """Connect a trainer in mode apply and train with it."""
    trainer.add_callback(ForeshockCallback(trainer, advice_mode="apply", **arguments))
    return trainer


def scales(trainer: Any) -> dict[int, float]:
    """Return the learning rate that TRL logged at each step, as a part of that of the schedule."""
    logged = (entry for entry in trainer.state.log_history if "learning_rate" in entry)
    return {entry["step"]: entry["learning_rate"] / RATE for entry in logged}


def halving_reward(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    """Halve the learning rate as an operator in the first step, and wait until the feed has the answer."""
    if trainer_state.global_step == 0:
        halve_learning_rate("a test of TRL")
    return reward_of_ones(completions)


def first_part(*, connects: bool) -> Path:
    """Train up to the checkpoint, halving the learning rate if connected, and return its folder, moved elsewhere."""
    saving = {"save_strategy": "steps", "save_steps": CHECKPOINT_AFTER}
    reward = halving_reward if connects else reward_of_ones
    trainer = trainer_of(CHECKPOINT_AFTER, reward=reward, **saving)
    (connected(trainer) if connects else trainer).train()
    moved = folder / "elsewhere" / f"checkpoint-{CHECKPOINT_AFTER}"
    shutil.move(folder / "checkpoints" / moved.name, moved)
    return moved


def wanted() -> Any:
    """Two ranks, of which only the first has the service's request for the weights of a step."""
    # Ranks that wait for each other end with their stacks.
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    Client.want_weights_at_step = WANTED_STEP if rank == 0 else None  # type: ignore[assignment,method-assign]
    connected(trainer_of(4), weights_root="trl").train()
    return sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*"))


def elsewhere() -> Any:
    """Resume from a folder with advice that is not below `output_dir`, while the service is away."""
    checkpoint = first_part(connects=False)
    advice = Advice(run="run-1", attempt=1, revision=1, mode="apply", points=(Point(1, 1), Point(2, 2)))
    (checkpoint / ADVICE_FILE).write_text(json.dumps({"advice": advice.to_json()}))
    trainer = connected(trainer_of(CHECKPOINT_AFTER + 1))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return scales(trainer)


def unsaved() -> Any:
    """Resume from a folder without advice."""
    checkpoint = first_part(connects=True)
    (checkpoint / ADVICE_FILE).unlink()
    trainer = connected(trainer_of(CHECKPOINT_AFTER + 1))
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return scales(trainer)


def twice() -> Any:
    """Train twice with one trainer, and as often with a client of the caller's."""
    trainer = connected(trainer_of(1))
    trainer.train()
    trainer.train()
    with Client(run_key=os.environ["FORESHOCK_RUN_KEY"] + "-given") as client:
        trainer = connected(trainer_of(1), client=client)
        trainer.train()
        trainer.train()
        client.log_scalars(1, {"after": 1.0})
        return str(client.flush())


def again() -> Any:
    """Train again after an error beyond the generation of a step; return how many feeds ran in each generation."""
    feeds: list[int] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        feeds.append(sum(each.name == "foreshock-advice" for each in threading.enumerate()))
        return reward_of_ones(completions)

    trainer = connected(trainer_of(2, reward=reward))
    own = trainer.training_step

    def training_step(model: Any, inputs: Any, *arguments: Any) -> Any:
        trainer._prepare_inputs(inputs)
        raise RuntimeError("CUDA out of memory.")

    trainer.training_step = training_step
    try:
        trainer.train()
    except RuntimeError:
        trainer.training_step = own
    trainer.train()
    return feeds


if __name__ == "__main__":
    scenarios = {"wanted": wanted, "elsewhere": elsewhere, "unsaved": unsaved, "twice": twice, "again": again}
    print("LOG " + json.dumps(scenarios[scenario]()))
