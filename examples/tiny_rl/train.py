"""Train: warm up, then sample, reward, update and reload at every step; log to Foreshock and apply its advice.

    python -m examples.tiny_rl.train --output my-run                                  # to disk only
    python -m examples.tiny_rl.train --output my-run --url http://127.0.0.1:8765      # and to a service

The learning rate of a step is the base rate times the scale that the service advises for it.

Two faults can be planted: `--trainer-temperature 1.0` beside `--temperature 0.7` forgets the temperature in the
trainer, and `--lag-from 60 --steps-per-lag 5` lets the engine fall behind by one more version every 5 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from examples.tiny_rl.fingerprints import engine_fingerprint, trainer_fingerprint
from examples.tiny_rl.model import load_model, new_model, parameter_count, save_model
from examples.tiny_rl.record import Attempt, Manifest, RunDescription, RunRecord
from examples.tiny_rl.reload_check import ReloadCheck, ReloadReport
from examples.tiny_rl.rollouts import StepRollouts, sample_step
from examples.tiny_rl.run_log import RunLog, open_run_log
from examples.tiny_rl.sampler import Sampler, Samples
from examples.tiny_rl.sglang_sampler import IN_BFLOAT16, SglangSampler, running_sglang
from examples.tiny_rl.task import FEWEST_DIGITS, MAX_RESPONSE_TOKENS, MOST_DIGITS, draw_problem
from examples.tiny_rl.trainer import Trainer, TrainerOptions, Update
from examples.tiny_rl.warm_up import BOTH_WAYS, MOSTLY_GUESSES, warm_up
from foreshock.digests import weights_digest
from foreshock.learning_rate import applied_learning_rates, apply_scale
from foreshock.process_fingerprint import cpu_name
from foreshock.scorers import noise_floor_scorers

logger = logging.getLogger(__name__)

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}

SCORER_OPTIONS = {
    noise_floor_scorers("trainer")[0]: {"autocast": "bfloat16", "master_dtype": "float32", "batch_size": 128}
}
"""The settings of `policy.py` as options of the scorer that replays the trainer."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of the command line."""

    output: Path
    engine: str
    url: str | None
    key: str
    name: str
    start_from: Path | None
    steps: int
    prompts: int
    responses: int
    learning_rate: float
    checkpoint_every: int
    seed: int
    temperature: float
    trainer_temperature: float | None
    lag_from: int | None
    steps_per_lag: int
    greatest_lag: int

    def lag(self, step: int) -> int:
        """Return how many versions the engine is behind the trainer at a step."""
        if self.lag_from is None or step < self.lag_from:
            return 0
        return min(1 + (step - self.lag_from) // self.steps_per_lag, self.greatest_lag)


def train(options: TrainOptions) -> None:
    """Run the training, logging to `options.output` and, if `url` is given, to the service."""
    record = RunRecord.create(options.output)
    weights = options.output / "weights"
    save_model(prepare_model(options), weights)
    # Loaded from disk also if it was just made, so that both ways start from the same numbers.
    model = load_model(weights)
    trainer = Trainer(model, trainer_options(options))
    attempt = Attempt(key=f"{options.key}-1", resume_step=1)
    with (
        open_sampler(options, weights) as sampler,
        open_run_log(record, describe(options, model, sampler), attempt, options.url) as log,
    ):
        check = ReloadCheck(sampler, model, seed=options.seed)
        versions = Versions(options.output / "versions", weights)
        random_source = random.Random(options.seed)
        for step in range(1, options.steps + 1):
            if step in (1, options.steps) or step % options.checkpoint_every == 0:
                log.log_checkpoint(step, weights)
            problems = [draw_problem(random_source) for _ in range(options.prompts)]
            rollouts = sample_step(
                step, sampler, problems, options.responses, versions.served, temperature=options.temperature
            )
            learn(step, rollouts, weights, sampler, check, trainer, log, versions, options)
        record.write_manifest(make_manifest(options, record, attempt, model, sampler))


@contextlib.contextmanager
def open_sampler(options: TrainOptions, weights: Path) -> Iterator[Samples]:
    """Yield the engine with the weights: vLLM in this process, or a server of SGLang that ends with the context."""
    if options.engine == "vllm":
        yield Sampler(weights, options.seed, temperature=options.temperature)
        return
    arguments = (*IN_BFLOAT16, "--random-seed", str(options.seed))
    with running_sglang(weights, options.output / "sglang.log", *arguments) as server:
        yield SglangSampler(server)


class Versions:
    """The newest versions of the weights, and which the engine holds. Without a lag, version n samples step n."""

    def __init__(self, folder: Path, weights: Path) -> None:
        self._folder = folder
        self._weights = weights
        self._digests: dict[int, str] = {}
        self.served = 1
        self.keep(1, 0)

    @property
    def served_digest(self) -> str:
        return self._digests[self.served]

    def path(self, version: int) -> Path:
        return self._folder / f"version_{version:04d}"

    def keep(self, version: int, greatest_lag: int) -> None:
        """Keep a copy of the weights as `version`; remove those that no lag can reach any more."""
        shutil.copytree(self._weights, self.path(version), dirs_exist_ok=True)
        self._digests[version] = weights_digest(self._weights)
        shutil.rmtree(self.path(version - greatest_lag - 1), ignore_errors=True)


def learn(
    step: int,
    rollouts: StepRollouts,
    weights: Path,
    sampler: Samples,
    check: ReloadCheck,
    trainer: Trainer,
    log: RunLog,
    versions: Versions,
    options: TrainOptions,
) -> None:
    """Update at the advised learning rate, load the version that samples the next step and check the reload."""
    fingerprints = (
        engine_fingerprint(
            sampler.version, versions.served, versions.served_digest, sampler.engine, options.temperature
        ),
        trainer_fingerprint(step, weights_digest(weights)),
    )
    apply_scale(trainer.optimizer, log.scale(step))
    learning_rate = applied_learning_rates(trainer.optimizer)[0]
    update = trainer.step(rollouts.prompts, rollouts.token_ids, rollouts.advantages)
    save_model(trainer.model, weights)
    versions.keep(step + 1, options.greatest_lag)
    served = max(versions.served, step + 1 - options.lag(step + 1))
    report = None
    if served != versions.served:
        sampler.reload(versions.path(served))
        versions.served = served
        if served == step + 1:
            report = check.after_reload(trainer.model)
    scalars = scalars_of(rollouts, update, report, learning_rate)
    log.log_step(step, rollouts.as_batch(update, *fingerprints), scalars)
    logger.info("step %d: %s", step, ", ".join(f"{name} {value:.4g}" for name, value in scalars.items()))


def scalars_of(
    rollouts: StepRollouts, update: Update, report: ReloadReport | None, learning_rate: float
) -> dict[str, float]:
    """Return the trainer's scalars of a step; `report` is None if the engine lags behind the trainer."""
    behaviour = np.concatenate([response.log_probs for response in rollouts.responses])
    difference = update.log_probs.astype(np.float64) - behaviour
    return {
        "lr": learning_rate,
        "reward": float(rollouts.rewards.mean()),
        "response_length": rollouts.mean_response_length,
        "grad_norm": update.gradient_norm,
        "entropy": float(update.entropy.mean(dtype=np.float64)),
        "k3": float(np.mean(np.expm1(difference) - difference)),
        **({"reload_mean_abs_d": report.mean_difference, "reload_slope": report.slope} if report else {}),
    }


def prepare_model(options: TrainOptions) -> Qwen3ForCausalLM:
    """Return the model that reinforcement learning starts from: loaded, or warmed up here (some minutes)."""
    if options.start_from is not None:
        return load_model(options.start_from)
    model = new_model(options.seed)
    warm_up(model, (BOTH_WAYS, MOSTLY_GUESSES), options.seed)
    return model


def trainer_options(options: TrainOptions) -> TrainerOptions:
    """Return the trainer's options: its temperature is that of the sampling, unless another is asked for."""
    temperature = options.temperature if options.trainer_temperature is None else options.trainer_temperature
    return TrainerOptions(options.learning_rate, temperature=temperature)


def describe(options: TrainOptions, model: Qwen3ForCausalLM, sampler: Samples) -> RunDescription:
    return RunDescription(
        key=options.key,
        name=options.name,
        model=f"Qwen3 architecture, {parameter_count(model) / 1e6:.2f} M parameters",
        trainer="RLOO, torch, bfloat16 autocast over float32 master weights",
        engine=f"{ENGINES[sampler.engine]} {sampler.version} (CPU, bfloat16)",
        hardware=cpu_name(),
        initial_learning_rate=options.learning_rate,
        length_cap=MAX_RESPONSE_TOKENS,
    )


def make_manifest(
    options: TrainOptions, record: RunRecord, attempt: Attempt, model: Qwen3ForCausalLM, sampler: Samples
) -> Manifest:
    return Manifest(
        run=describe(options, model, sampler),
        parameters=parameter_count(model),
        task=f"sums of {FEWEST_DIGITS} to {MOST_DIGITS} digits",
        training={
            "algorithm": "RLOO",
            "prompts": options.prompts,
            "responses": options.responses,
            "seed": options.seed,
            **asdict(trainer_options(options)),
            "sampling_temperature": options.temperature,
            "lag_from": options.lag_from,
        },
        scorer_options=SCORER_OPTIONS,
        engine_fingerprint=engine_fingerprint(
            sampler.version, None, None, sampler.engine, options.temperature
        ).to_dict(),
        attempts=[attempt],
        steps=options.steps,
        checkpoints=record.checkpoints_found(),
        trainer_fingerprint=trainer_fingerprint(None, None).to_dict(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a new folder for the run's record")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm", help="what samples")
    parser.add_argument("--url", help="the service to log to; without it the run is recorded on disk only")
    parser.add_argument("--key", default="tiny-rl", help="the run's lasting name at the service")
    parser.add_argument("--name", default="Tiny sums, RLOO on two CPU cores", help="shown on pages")
    parser.add_argument("--start-from", type=Path, help="warmed-up weights, such as recorded/checkpoints/step_0001")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--responses", type=int, default=16, help="per prompt")
    parser.add_argument("--learning-rate", type=float, default=TrainerOptions().learning_rate)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampling")
    parser.add_argument("--trainer-temperature", type=float, help="of the trainer's log-probs; by default the same")
    parser.add_argument("--lag-from", type=int, metavar="STEP", help="from this step on the engine falls behind")
    parser.add_argument("--steps-per-lag", type=int, default=5, metavar="N", help="one more version every N steps")
    parser.add_argument("--greatest-lag", type=int, default=16, metavar="N")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("examples").setLevel(logging.INFO)
    logger.setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()
    train(TrainOptions(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
