"""Record rollouts that a real engine sampled with other weights than its trainer announced; the truth is known.

    python -m benchmarks.partial_sync /a/new/folder
    python -m benchmarks.partial_sync /a/new/folder --tied

The checkpoints are those of the recorded run (steps 1, 45, 160) and step 161, one real update later. For each fault the
engine, vLLM, is loaded with the faulty weights and samples a step; the trainer's log-probs are those of the announced
weights of step 161. The folder of checkpoints also gets one Parquet file of rollouts per fault.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from benchmarks.recorded_runs import shipped_run
from examples.tiny_rl.fingerprints import engine_fingerprint, trainer_fingerprint
from examples.tiny_rl.model import load_model, save_model
from examples.tiny_rl.policy import next_token_log_probs, pad
from examples.tiny_rl.rollouts import StepRollouts, sample_step
from examples.tiny_rl.sampler import Sampler
from examples.tiny_rl.task import draw_problem
from examples.tiny_rl.trainer import Trainer, TrainerOptions, Update
from foreshock.digests import weights_digest
from foreshock.rollouts import encode_rollouts
from foreshock_probes.doctor.tensors import part_of

ANNOUNCED = (1, 45, 160, 161)
STEP = 161
PROMPTS, RESPONSES = 8, 16


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: the engine held the weights of `STEP`, but `parts` (None: all) were those of `step`."""

    step: int
    parts: tuple[str, ...] | None


FAULTS: Mapping[str, Fault] = {
    "right": Fault(STEP, None),
    "one_step_behind": Fault(160, None),
    "first_step": Fault(1, None),
    "head_of_first": Fault(1, ("lm_head",)),
    "head_of_middle": Fault(45, ("lm_head",)),
    "embeddings_of_first": Fault(1, ("embeddings",)),
    "layer_of_middle": Fault(45, ("layers.1",)),
}
TIED = "tied_head_left_stale"
"""A model with tied embeddings: vLLM's own reload in place leaves the old head on a CPU."""
TIED_STEPS = (1, 45)


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's announced weights."""
    return folder / "checkpoints" / f"step_{step:04d}"


def tied_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's tied weights."""
    return folder / "tied" / f"step_{step:04d}"


def rollouts_file(folder: Path, fault: str) -> Path:
    """Return the file of a fault's rollouts."""
    return folder / f"{fault}.parquet"


def record_faults(folder: Path, seed: int = 7) -> None:
    """Write the checkpoints and the rollouts of every fault to `folder`. Call it in a process of its own."""
    run = shipped_run()
    for step in run.steps():
        shutil.copytree(run.checkpoint(step), checkpoint_folder(folder, step))
    sampler = Sampler(run.checkpoint(run.steps()[-1]), seed)
    _update_once(sampler, folder, seed)
    model = load_model(checkpoint_folder(folder, STEP))
    for number, (name, fault) in enumerate(FAULTS.items()):
        held = folder / "held"
        _assemble(checkpoint_folder(folder, STEP), checkpoint_folder(folder, fault.step), fault.parts, held)
        sampler.reload(held)
        shutil.rmtree(held)
        rollouts = _sample(sampler, STEP, seed + 1 + number)
        rollouts_file(folder, name).write_bytes(_logged(sampler, rollouts, model, checkpoint_folder(folder, STEP)))


def record_tied(folder: Path, seed: int = 7) -> None:
    """Write tied checkpoints, and rollouts that vLLM sampled after its own reload from the first to the last of them.

    The embeddings of the recorded run are also used as its head. Call it in a process of its own.
    """
    run = shipped_run()
    for step in TIED_STEPS:
        source, target = run.checkpoint(step), tied_folder(folder, step)
        target.mkdir(parents=True)
        configuration = json.loads((source / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(configuration | {"tie_word_embeddings": True}))
        tensors = load_file(source / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    first, last = (tied_folder(folder, step) for step in TIED_STEPS)
    sampler = Sampler(first, seed)
    sampler.reload(last)
    rollouts = _sample(sampler, TIED_STEPS[-1], seed)
    rollouts_file(folder, TIED).write_bytes(_logged(sampler, rollouts, load_model(last), last))


def _assemble(base: Path, other: Path, parts: tuple[str, ...] | None, folder: Path) -> None:
    """Write the weights of `base` to the new `folder`, with `parts` (None: all) of `other`."""
    tensors, others = (load_file(each / "model.safetensors") for each in (base, other))
    tensors |= {name: others[name] for name in tensors if parts is None or part_of(name) in parts}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(base / "config.json", folder)


def _logged(sampler: Sampler, rollouts: StepRollouts, model: Qwen3ForCausalLM, announced: Path) -> bytes:
    """Return the rollouts with the log-probs of the trainer's `model`, whose weights are those in `announced`."""
    batch = pad(rollouts.prompts, rollouts.token_ids)
    with torch.no_grad():
        log_probs, entropy = (values[batch.response_mask] for values in next_token_log_probs(model, batch))
    update = Update(log_probs.numpy(), entropy.numpy(), gradient_norm=0.0)
    digest = weights_digest(announced)
    engine = engine_fingerprint(sampler.version, rollouts.step, digest)
    return encode_rollouts(rollouts.as_batch(update, engine, trainer_fingerprint(rollouts.step, digest)))


def _update_once(sampler: Sampler, folder: Path, seed: int) -> None:
    """Train one step from the last recorded weights and save the result as the checkpoint of `STEP`."""
    trainer = Trainer(load_model(checkpoint_folder(folder, STEP - 1)), TrainerOptions())
    rollouts = _sample(sampler, STEP - 1, seed)
    if not np.any(rollouts.advantages):
        raise RuntimeError("all responses of each prompt had the same reward, so there is no update; use another seed")
    trainer.step(rollouts.prompts, rollouts.token_ids, rollouts.advantages)
    save_model(trainer.model, checkpoint_folder(folder, STEP))


def _sample(sampler: Sampler, step: int, seed: int) -> StepRollouts:
    source = random.Random(seed)
    return sample_step(step, sampler, [draw_problem(source) for _ in range(PROMPTS)], RESPONSES)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    (record_tied if "--tied" in sys.argv else record_faults)(target)
