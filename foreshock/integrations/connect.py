"""Connect a trainer of a framework without a hook of its own, by one call in the process of its loop.

    from foreshock.integrations.connect import connect

    connect(trainer, run_key="my-run")

`connect` observes where the trainer has its batch, its metrics and its rate. Nothing of it raises into the trainer. In
a loop of your own, or in one that you may patch, a `Connection` takes the batch and the metrics as they are.
"""

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import numpy as np

from foreshock.client.reporting import LogOnce
from foreshock.errors import ConfigurationError
from foreshock.integrations import clip_range
from foreshock.integrations.batches import columns_of_batch
from foreshock.integrations.corrections import SetCorrection
from foreshock.integrations.hooks import guard, is_number, observe
from foreshock.integrations.releases import KNOWN_VERSIONS, installed, warn_of_unknown_version
from foreshock.integrations.trainer_run import (
    Decisions,
    TrainerRun,
    modes_of_environment,
    of_the_leader,
)
from foreshock.learning_rate.levers import Correction
from foreshock.learning_rate.modes import AdviceMode
from foreshock.model_kind import model_kind_of_folder
from foreshock.rollouts.attributes import BatchAttributes, TrainerPolicy

__all__ = ["KINDS", "Connection", "connect"]


class Connection(TrainerRun):
    """A run of a trainer: its client, made at once, and its attempt, which begins with the first data.

    `run_key` is your permanent name of the run, by default `FORESHOCK_RUN_KEY`; `description` are further arguments of
    `Client.start_run`. `set_correction`: see `foreshock.integrations.trainer_run`.
    """

    def __init__(
        self,
        framework: str,
        *,
        run_key: str | None = None,
        advice_mode: AdviceMode | None = None,
        **description: Any,
    ) -> None:
        self.set_correction: SetCorrection = lambda _: None
        log = LogOnce(f"foreshock.integrations.{framework}")
        super().__init__(framework, log, lambda correction: self.set_correction(correction))
        self.client = self.connect(run_key or os.environ.get("FORESHOCK_RUN_KEY"))
        given = {} if advice_mode is None else {"advice_mode": advice_mode}
        trainer = f"{framework} {installed(framework)}".strip()
        self._description = {**modes_of_environment(), **given, "trainer": trainer, **description}
        self._started = False
        if framework in KNOWN_VERSIONS:
            warn_of_unknown_version(framework, log)

    def describe(self, **description: Any) -> None:
        """Add arguments of `Client.start_run` before the attempt begins; those that were given before count."""
        self._description |= {name: value for name, value in description.items() if not self._description.get(name)}

    def begin(self, step: int) -> None:
        """Begin the attempt, if it has not begun."""
        if not self._started:
            self._started = True
            model = self._description.get("model")
            if model is not None:
                self.describe(model_kind=model_kind_of_folder(str(model)))
            self.start(step, leads=not self._description.get("shard"), **self._description)

    def log_batch(
        self,
        step: int,
        batch: Any,
        *,
        policy: TrainerPolicy = "recomputed_old",
        of_next: tuple[str, ...] = (),
        trained: int | None = None,
        is_synchronous: bool = False,
    ) -> None:
        """Log the rollouts of a step from a batch as the framework has it.

        `policy` is the kind of its trainer's log-probs, `trained` the version of the weights that computed them (None:
        unknown), which also sampled the rollouts if the trainer `is_synchronous`; `of_next`: see `columns_of_batch`.
        """
        columns = columns_of_batch(batch, self.framework, self.log, of_next=of_next)
        if columns is None:
            return
        self.warn_of_missing_log_probs(
            columns,
            "batch has no log-probs of the engine (let it return them)",
            "batch has no log-probs of the trainer",
        )
        self.begin(step)
        attributes = self._description.get("attributes") or BatchAttributes()
        if "trainer_log_probs" in columns:
            attributes = replace(attributes, trainer_policy=policy, trainer_weights_version=trained)
            if trained is not None and is_synchronous:
                columns["weights_version"] = np.full(columns["response_token_ids"].shape, trained, np.int32)
        self.log_columns(step, columns, attributes=attributes)

    def log_rollouts(self, step: int, batch: Any, **keywords: Any) -> None:
        """Log the rollouts of a step as `log_batch`, and never raise."""
        guard(lambda: self.log_batch(step, batch, **keywords), self.log, "Connection.log_rollouts")

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers among the trainer's metrics, and mark the run as finished after its planned last step."""
        self.begin(step)
        super().log_metrics(step, metrics)
        last = self.planned()
        if is_number(last) and step >= last and self.client is not None:
            self.client.finish()

    def decisions(self, step: int) -> Decisions:
        """Return the scale and the correction of a step: 1.0 and None in shadow mode and in all ranks but the first."""
        self.begin(step)
        return super().decisions(step)

    def scale(self, step: int) -> float:
        """Return the factor on the learning rate of a step."""
        return self.decisions(step)[0]

    def correction(self, step: int) -> Correction | None:
        """Return the correction of the loss of a step; None: as the trainer is configured, also in shadow mode."""
        return self.decisions(step)[1]

    def acknowledge(self, step: int, rate: float, scale: float) -> None:
        """Report the rate that was applied, and the scale in it."""
        if self.feed is not None:
            self.feed.acknowledge(step, rate, scale)


def connect(
    trainer: Any, *, run_key: str | None = None, advice_mode: AdviceMode | None = None, **description: Any
) -> Connection:
    """Observe a trainer, or the module of a training loop, and return its run.

    `description` are further arguments of `Client.start_run`, which count before what the trainer's configuration
    gives. Raises ConfigurationError if the trainer is of no known framework.
    """
    classes = [f"{each.__module__}.{each.__qualname__}" for each in type(trainer).__mro__]
    names = [trainer.__name__] if isinstance(trainer, ModuleType) else classes
    owner = next((name for name in names if name in KINDS), None)
    if owner is None:
        known = ", ".join(f"{framework} ({name})" for name, (framework, _) in KINDS.items())
        raise ConfigurationError(
            f"{names[0]} is of no known framework: {known}. Elsewhere a Connection takes the batch as it is"
        )
    framework, observe_trainer = KINDS[owner]
    run = Connection(framework, run_key=run_key, advice_mode=advice_mode, **description)
    guard(lambda: observe_trainer(run, trainer), run.log, f"connect: {framework}")
    return run


def _metrics_of(run: Connection, data: int, step: int) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
    """Return an observer that logs the metrics of a call, which are at these places; its `step` may be a keyword."""

    def log(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        number = arguments[step] if len(arguments) > step else keywords.get("step")
        if number is not None:
            run.log_metrics(int(number), arguments[data])

    return log


# AReaL's default top-k is 100,000,000, which is no truncation.
_ALL_TOKENS = 10_000_000


def _described(run: Connection, model: Any, learning_rate: Any, cap: Any, sampling: Any, **declared: Any) -> None:
    """Describe the run before its first data; `declared` are further attributes of its batches."""
    top_k = getattr(sampling, "top_k", None)
    attributes = BatchAttributes(
        temperature=0.0 if getattr(sampling, "greedy", False) else sampling.temperature,
        top_p=getattr(sampling, "top_p", None),
        top_k=-1 if top_k is not None and top_k >= _ALL_TOKENS else top_k,
        min_p=getattr(sampling, "min_p", None),
        length_cap=int(cap),
        **declared,
    )
    run.describe(
        model=str(model), initial_learning_rate=float(learning_rate), length_cap=int(cap), attributes=attributes
    )


def _observe_skyrl(run: Connection, trainer: Any) -> None:
    """SkyRL: the batch before its training, the tracker, and the workers' rate before each optimizer step."""
    policy, sampling = trainer.cfg.trainer.policy, trainer.cfg.generator.sampling_params
    algorithm = trainer.cfg.trainer.algorithm
    _described(
        run, policy.model.path, policy.optimizer_config.lr, sampling.max_generate_length, sampling,
        loss_aggregation=algorithm.loss_reduction, **clip_range("skyrl", algorithm),
    )  # fmt: skip
    # Its own loop sends the weights to the engines after each update.
    is_synchronous = type(trainer).train.__qualname__ == "RayPPOTrainer.train"
    run.planned = lambda: trainer.total_training_steps
    run.set_correction = _refused_by_skyrl
    rate: dict[str, float] = {}

    def note_rate(_arguments: Any, _keywords: Any, result: Any) -> None:
        # The scheduler's rate, whatever was set over it.
        rate["scheduled"] = float(result.metrics.get("policy_lr", result.metrics.get("lr", math.nan)))

    def apply(arguments: Any, _keywords: Any) -> None:
        scale, correction = run.decisions(trainer.global_step)
        run.correct(correction, trainer.global_step)
        scheduled = rate.get("scheduled", math.nan)
        if arguments[0] == "policy" and math.isfinite(scheduled) and (scale != 1 or "applied" in rate):
            rate["applied"] = scheduled * scale
            trainer.dispatch.set_lr("policy", rate["applied"])
            run.acknowledge(trainer.global_step, rate["applied"], scale)

    def log(arguments: Any, _keywords: Any) -> None:
        # The dispatch exists since the models were built.
        observe(trainer.dispatch, "forward_backward_from_staged", run.log, after=note_rate)
        observe(trainer.dispatch, "optim_step", run.log, before=apply)
        step = trainer.global_step
        run.log_rollouts(step, arguments[0], trained=step - 1, is_synchronous=is_synchronous)

    observe(trainer, "train_critic_and_policy", run.log, before=log)
    observe(trainer.tracker, "log", run.log, before=_metrics_of(run, 0, 1))


def _refused_by_skyrl(correction: Correction | None) -> str | None:
    if correction is None:
        return None
    level = "sequence" if correction.kind.startswith("sequence") else "token"
    return (
        "SkyRL's workers have copies of the configuration: put trainer.algorithm.off_policy_correction."
        f"tis_ratio_type={level} and {level}_tis_ratio_clip_high={correction.bounds.upper:g} into it and restart"
    )


def _observe_areal(run: Connection, trainer: Any) -> None:
    """AReaL: the batch before its advantages, the rate of this rank's optimizer, and the metrics that are committed."""
    actor, config = trainer.actor, trainer.config
    _described(
        run, config.actor.path, config.actor.optimizer.lr, config.gconfig.max_new_tokens, config.gconfig,
        **clip_range("areal", config.actor),
    )  # fmt: skip
    run.planned = lambda: None if config.total_train_steps is None else int(config.total_train_steps) - 1
    shard = int(actor.data_parallel_rank)
    run.describe(shard=shard, shards=int(actor.data_parallel_world_size))

    def log(arguments: Any, _keywords: Any) -> None:
        # Its own log-probs stand at the place before their token; those of the engine do not.
        version = int(actor.get_version())
        run.log_rollouts(version, arguments[0], of_next=("prox_logp",), trained=version)

    def apply(_arguments: Any, _keywords: Any) -> None:
        import torch

        step = int(actor.get_version())
        own = run.decisions(step) if torch.distributed.get_rank() == 0 else None
        scale, correction = of_the_leader(own, lambda: actor.cpu_group)
        run.correct(correction, step)
        run.apply(actor.optimizer, scale, step)

    own_sampling = config.actor.rejection_sampling

    def correct(correction: Correction | None) -> str | None:
        if correction is None:
            config.actor.rejection_sampling = own_sampling
            return None
        bounds = correction.bounds
        action = "clamp" if correction.kind.endswith("tis") else "mask"
        if not config.actor.use_decoupled_loss or correction.kind.startswith("sequence"):
            return (
                "AReaL corrects the tokens of its decoupled loss: put actor.use_decoupled_loss=true and "
                f"actor.rejection_sampling={{level: token, action: {action}, upper: {bounds.upper:g}}} into it"
            )
        from areal.api.cli_args import RejectionSamplingConfig

        config.actor.rejection_sampling = RejectionSamplingConfig(
            level="token", action=action, metric="ratio", upper=bounds.upper, lower=bounds.lower
        )
        return None

    run.set_correction = correct
    observe(actor, "compute_advantages", run.log, before=log)
    if hasattr(actor, "optimizer"):
        observe(actor, "ppo_update", run.log, before=apply)
    else:
        run.log.warning("rate", "AReaL's single controller has no optimizer in this process: the advice is not applied")
    if shard == 0:
        observe(trainer.stats_logger, "commit", run.log, before=_metrics_of(run, 3, 2))


def _observe_tinker(run: Connection, module: Any) -> None:
    """tinker-cookbook: the data with the log-probs of both sides, the rate of each `optim_step`, and the logger."""
    import tinker
    from tinker_cookbook.utils import ml_log

    step: dict[str, int] = {"substeps": 1}
    own_step = tinker.TrainingClient.optim_step
    loops = ("do_sync_training", "do_sync_training_with_stream_minibatch", "do_async_training")

    def begin(_arguments: Any, keywords: Any) -> None:
        config, last = keywords["config"], int(keywords["end_batch"]) - 1
        step["substeps"] = int(config.num_substeps)
        step["is_synchronous"] = config.async_config is None
        run.planned = lambda: last
        _described(run, config.model_name, config.learning_rate, config.max_tokens, config)

    def note_step(arguments: Any, keywords: Any) -> None:
        step["newest"] = int(arguments[1] if len(arguments) > 1 else keywords["i_batch"])

    def log(arguments: Any, _keywords: Any) -> None:
        # It is called with the number of the checkpoint, which is that of the next step.
        batch = [_of_datum(*pair) for pair in zip(arguments[3], arguments[4], strict=True)]
        number = int(arguments[2]) - 1
        if step["substeps"] > 1:
            run.log_rollouts(number, batch, policy="current")
            return
        run.log_rollouts(number, batch, trained=number, is_synchronous=bool(step.get("is_synchronous")))

    @functools.wraps(own_step)
    def optim_step(client: Any, optim_params: Any = None, *, adam_params: Any = None) -> Any:
        given = adam_params if optim_params is None else optim_params
        if given is not None and "newest" in step:
            scale, correction = run.decisions(step["newest"])
            run.correct(correction, step["newest"])
            given = given.model_copy(update={"learning_rate": given.learning_rate * scale})
            run.acknowledge(step["newest"], given.learning_rate, scale)
        return own_step(client, given)

    run.set_correction = _refused_by_tinker
    for name in loops:
        observe(module, name, run.log, before=begin)
    for name in ("do_train_step_and_get_sampling_client", "do_train_step_streaming_and_get_sampling_client"):
        observe(module, name, run.log, before=note_step)
    observe(module, "compute_full_batch_metrics_and_get_sampling_client", run.log, before=log)
    observe(ml_log.MultiplexLogger, "log_metrics", run.log, before=_metrics_of(run, 1, 2))
    tinker.TrainingClient.optim_step = optim_step


def _refused_by_tinker(correction: Correction | None) -> str | None:
    if correction is None:
        return None
    return "tinker's losses run on its servers: loss_fn importance_sampling weights tokens by π/μ, ppo clips it too"


def _of_datum(datum: Any, log_probs: Any) -> dict[str, Any]:
    inputs = {name: [values.tolist()] for name, values in datum.loss_fn_inputs.items()}
    tokens = [*datum.model_input.to_ints(), inputs["target_tokens"][0][-1]]
    return {**inputs, "input_ids": [tokens], "loss_mask": inputs["mask"], "training_logprobs": [log_probs.tolist()]}


KINDS: Final[Mapping[str, tuple[str, Callable[[Connection, Any], None]]]] = {
    "tinker_cookbook.rl.train": ("tinker-cookbook", _observe_tinker),
    "areal.trainer.rl_trainer.PPOTrainer": ("areal", _observe_areal),
    "skyrl.train.trainer.RayPPOTrainer": ("skyrl", _observe_skyrl),
}
"""The class of the trainer that has the loop, or the module of the loop → the framework, and what observes it."""
