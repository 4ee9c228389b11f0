"""Runs of real TRL trainers, each in a process of its own because vLLM's engine lives there. Prints TRL's log as JSON.

python -m tests.foreshock.integrations.trl_runs FOLDER ALGORITHM ENGINE SCENARIO STEPS HALVED_AT
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trl.generation import vllm_generation

from examples.trl.train import new_trainer, reward_of_ones
from tests.foreshock.integrations.operators import SMALL_RATE, halve_learning_rate


def halving_reward(completions: list[str], trainer_state: Any = None, **_: Any) -> list[float]:
    """Halve the learning rate as an operator during one step, and wait until the feed has the answer."""
    if trainer_state.global_step + 1 == int(sys.argv[6]):
        halve_learning_rate("a test of TRL")
    return reward_of_ones(completions)


def main() -> None:
    """Run one scenario and print TRL's log history."""
    folder, algorithm, engine, scenario = Path(sys.argv[1]), *sys.argv[2:5]
    # TRL has no argument for it; compiling the model takes most of the time of a run of four steps.
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
    from foreshock.integrations.trl import ForeshockCallback

    arguments: dict[str, Any] = {"steps": int(sys.argv[5]), "algorithm": algorithm, "use_vllm": engine == "vllm"}
    if scenario == "apply":
        arguments |= {"reward": halving_reward, "lr_scheduler_type": "constant", "save_strategy": "steps",
                      "save_steps": 2, "mask_truncated_completions": True, "learning_rate": SMALL_RATE}  # fmt: skip
    trainer = new_trainer(folder, **arguments)
    mode: Literal["apply", "shadow"] = "apply" if scenario == "apply" else "shadow"
    callback = ForeshockCallback(
        trainer, advice_mode=mode, correction_mode=mode, weights_root="trl", notary=scenario == "apply"
    )
    trainer.add_callback(callback)
    trainer.train()
    print("LOG " + json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
