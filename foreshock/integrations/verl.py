"""verl: observe its PPO trainer on the driver, and apply the advice in its workers.

Nothing is called by the user. verl loads the entry point `verl.plugins: foreshock` (`verl_plugin.py`) in every process;
with `FORESHOCK_URL` set, `RayPPOTrainer` is observed when it is imported:

- `_compute_old_log_prob`: the response mask before rejection sampling, and the entropies;
- `compute_advantage`: the batch with log-probs, rewards and advantages, which is logged;
- `Tracking.log`: verl's metrics, logged under verl's names;
- `_save_checkpoint`: announced if verl saves Hugging Face weights (`checkpoint.save_contents` has "hf_model");
- `_update_actor`: the advised scale travels to the workers in the batch's `meta_info`, so all of them have the same.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from foreshock.client.client import Client
from foreshock.client.log_once import LogOnce
from foreshock.integrations.hooks import guard, is_number, is_observed, mark_observed, observe
from foreshock.integrations.verl_columns import attributes_of, columns_of
from foreshock.learning_rate.apply import applied_learning_rates, apply_scale
from foreshock.learning_rate.feed import AdviceFeed

__all__ = ["KNOWN_VERSIONS", "SCALE_KEY", "observe_tracking", "observe_trainer", "observe_workers"]

# The releases of verl that were run with this module.
KNOWN_VERSIONS = ("0.9",)
# The key of the scale in a batch's meta_info.
SCALE_KEY = "foreshock_learning_rate_scale"

_METHODS = ("fit", "_compute_old_log_prob", "_update_actor", "_save_checkpoint")
_log = LogOnce("foreshock.integrations.verl")


class _Run:
    """The run of the trainer whose `fit` is active in this process."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.response_mask: Any = None
        self.entropy: Any = None
        configuration = trainer.config
        name = f"{configuration.trainer.project_name}/{configuration.trainer.experiment_name}"
        self.client = Client(run_key=os.environ.get("FORESHOCK_RUN_KEY") or name)
        self.feed: AdviceFeed | None = None
        self.sent_scale: float | None = None
        self._started = False

    def start(self) -> None:
        """Describe the run before its first data; the trainer has loaded its checkpoint by then."""
        if self._started:
            return
        self._started = True
        configuration = self.trainer.config
        actor = configuration.actor_rollout_ref
        self.client.start_run(
            model=str(actor.model.path),
            trainer=f"verl {importlib.metadata.version('verl')} {actor.actor.get('strategy', '')}".strip(),
            engine=str(actor.rollout.name),
            initial_learning_rate=float(actor.actor.optim.lr),
            length_cap=actor.rollout.get("response_length", None),
            advice_mode="apply" if os.environ.get("FORESHOCK_ADVICE_MODE") == "apply" else "shadow",
            resume_step=int(self.trainer.global_steps),
            attributes=attributes_of(configuration),
        )
        self.feed = AdviceFeed(self.client)

    def end(self, *, failed: bool) -> None:
        """Mark the run as finished or failed and deliver what is left."""
        if self.feed is not None:
            self.feed.close()
        if self._started:
            self.client.finish(failed=failed)
        self.client.close()


_active: list[_Run] = []


def observe_trainer(module: ModuleType) -> None:
    """Observe `RayPPOTrainer` of `verl.trainer.ppo.ray_trainer`; warn once if this release has other methods."""
    trainer_class = getattr(module, "RayPPOTrainer", None)
    missing = [name for name in _METHODS if not callable(getattr(trainer_class, name, None))]
    if missing or not callable(getattr(module, "compute_advantage", None)):
        _log.warning(
            "methods",
            f"verl {importlib.metadata.version('verl')}: RayPPOTrainer has no {(missing or ['compute_advantage'])[0]}, "
            f"so rollouts are not logged; metrics are. Known versions: {', '.join(KNOWN_VERSIONS)}.",
        )
        return
    _observe_fit(trainer_class)
    observe(trainer_class, "_compute_old_log_prob", _log, after=_note_forward_pass)
    observe(trainer_class, "_save_checkpoint", _log, after=_announce)
    observe(module, "compute_advantage", _log, after=_log_rollouts)
    observe(trainer_class, "_update_actor", _log, before=_send_scale)


def observe_tracking(module: ModuleType) -> None:
    """Observe `Tracking.log` of `verl.utils.tracking`."""
    observe(module.Tracking, "log", _log, after=_log_metrics)


def observe_workers(module: ModuleType) -> None:
    """Apply the scale in `TrainingWorker.train_mini_batch` of `verl.workers.engine_workers`."""
    observe(module.TrainingWorker, "train_mini_batch", _log, before=_apply_scale)


def _observe_fit(trainer_class: Any) -> None:
    original = trainer_class.fit
    if is_observed(trainer_class, "fit"):
        return

    @functools.wraps(original)
    def fit(self: Any, *arguments: Any, **keywords: Any) -> Any:
        guard(lambda: _active.append(_Run(self)), _log, "RayPPOTrainer.fit")
        failed = True
        try:
            result = original(self, *arguments, **keywords)
            failed = False
            return result
        finally:
            runs = list(_active)
            _active.clear()
            for run in runs:
                guard(functools.partial(run.end, failed=failed), _log, "RayPPOTrainer.fit")

    mark_observed(fit)
    trainer_class.fit = fit


def _note_forward_pass(arguments: tuple[Any, ...], _keywords: Any, result: Any) -> None:
    for run in _active:
        # Rejection sampling changes the mask later; what it rejects was sampled all the same.
        run.response_mask = arguments[1].batch["response_mask"].clone()
        output = result[0] if isinstance(result, tuple) else result
        run.entropy = output.batch["entropys"].clone() if "entropys" in output.batch.keys() else None  # noqa: SIM118


def _log_rollouts(_arguments: Any, _keywords: Any, result: Any) -> None:
    for run in _active:
        run.start()
        columns = columns_of(result, response_mask=run.response_mask, entropy=run.entropy)
        run.response_mask = run.entropy = None
        if "rollout_log_probs" not in columns:
            _log.warning(
                "no rollout log-probs",
                "verl's batch has no rollout_log_probs, so there is no training-inference mismatch to measure: set "
                "actor_rollout_ref.rollout.calculate_log_probs=True. Lengths, rewards and metrics are logged.",
            )
        run.client.log_rollouts(int(run.trainer.global_steps), columns)


def _log_metrics(arguments: tuple[Any, ...], keywords: Mapping[str, Any], _result: Any) -> None:
    named = dict(zip(("self", "data", "step"), arguments, strict=False)) | dict(keywords)
    numbers = {name: float(value) for name, value in named["data"].items() if is_number(value)}
    for run in _active:
        run.start()
        run.client.log_scalars(int(named["step"]), numbers)
        rate = numbers.get("actor/lr")
        if rate is not None and run.feed is not None:
            run.feed.acknowledge(int(named["step"]), rate, run.sent_scale)


def _announce(_arguments: Any, _keywords: Any, _result: Any) -> None:
    root = os.environ.get("FORESHOCK_WEIGHTS_ROOT")
    for run in _active:
        step = int(run.trainer.global_steps)
        path = f"global_step_{step}/actor/huggingface"
        folder = Path(str(run.trainer.config.trainer.default_local_dir)) / path
        if root and any(folder.glob("*.safetensors")):
            # Weights saved after the update of this step sample the next one.
            run.client.log_checkpoint(step + 1, root=root, path=path, local_folder=folder, weights_version=step)


def _send_scale(arguments: tuple[Any, ...], _keywords: Any) -> None:
    trainer, batch = arguments
    for run in _active:
        if run.feed is not None:
            run.sent_scale = batch.meta_info[SCALE_KEY] = run.feed.scale(int(trainer.global_steps))


def _apply_scale(arguments: tuple[Any, ...], _keywords: Any) -> None:
    from verl.utils import tensordict_utils

    worker, data = arguments
    scale = tensordict_utils.get(data, key=SCALE_KEY, default=None)
    optimizer = getattr(worker.engine, "optimizer", None)
    if scale is None or optimizer is None:
        return
    apply_scale(optimizer, float(scale))
    engine = worker.engine
    own_step = type(engine).lr_scheduler_step

    def lr_scheduler_step() -> Any:
        """Step the scheduler, and return the rate that the optimizer's next step has, for verl's metric `actor/lr`."""
        own_step(engine)
        return applied_learning_rates(optimizer)[0]

    engine.lr_scheduler_step = lr_scheduler_step
