"""verl: observe its PPO trainer on the driver, and apply the advice in its workers.

Nothing is called by the user. verl loads the entry point `verl.plugins: foreshock` (`verl_plugin.py`) in every process;
with `FORESHOCK_URL` set, `RayPPOTrainer` is observed when it is imported (its v1 trainers by `verl_v1.py`):

- `_compute_old_log_prob`: the response mask before rejection sampling, and the entropies;
- `compute_advantage`: the batch with log-probs, rewards and advantages, which is logged;
- `Tracking.log`: verl's metrics, logged under verl's names;
- `_save_checkpoint`: announced if verl saves Hugging Face weights (`checkpoint.save_contents` has "hf_model");
- `_update_actor`: the advised scale travels to the workers in the batch's `meta_info`, so all of them have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from foreshock.integrations.hooks import is_number, observe
from foreshock.integrations.verl_columns import columns_of
from foreshock.integrations.verl_run import ACTIVE, SCALE_KEY, announce_checkpoint, log, missing, observe_fit
from foreshock.learning_rate.apply import applied_learning_rates, apply_scale

__all__ = ["observe_tracking", "observe_trainer", "observe_workers"]

_METHODS = ("fit", "_compute_old_log_prob", "_update_actor", "_save_checkpoint")


def observe_trainer(module: ModuleType) -> None:
    """Observe `RayPPOTrainer` of `verl.trainer.ppo.ray_trainer`; warn once if this release has other methods."""
    trainer_class = getattr(module, "RayPPOTrainer", None)
    if missing(trainer_class, _METHODS):
        return
    observe_fit(trainer_class)
    observe(trainer_class, "_compute_old_log_prob", log, after=_note_forward_pass)
    observe(trainer_class, "_save_checkpoint", log, after=announce_checkpoint)
    observe(module, "compute_advantage", log, after=_log_rollouts)
    observe(trainer_class, "_update_actor", log, before=_send_scale)


def observe_tracking(module: ModuleType) -> None:
    """Observe `Tracking.log` of `verl.utils.tracking`."""
    observe(module.Tracking, "log", log, after=_log_metrics)


def observe_workers(module: ModuleType) -> None:
    """Apply the scale in `TrainingWorker.train_mini_batch` of `verl.workers.engine_workers`."""
    observe(module.TrainingWorker, "train_mini_batch", log, before=_apply_scale)


def _note_forward_pass(arguments: tuple[Any, ...], _keywords: Any, result: Any) -> None:
    for run in ACTIVE:
        # Rejection sampling changes the mask later; what it rejects was sampled all the same.
        run.response_mask = arguments[1].batch["response_mask"].clone()
        output = result[0] if isinstance(result, tuple) else result
        run.entropy = output.batch["entropys"].clone() if "entropys" in output.batch.keys() else None  # noqa: SIM118


def _log_rollouts(_arguments: Any, _keywords: Any, result: Any) -> None:
    for run in ACTIVE:
        run.start()
        columns = columns_of(result, response_mask=run.response_mask, entropy=run.entropy)
        run.response_mask = run.entropy = None
        run.warn_of_missing_log_probs(columns)
        run.client.log_rollouts(int(run.trainer.global_steps), columns)


def _log_metrics(arguments: tuple[Any, ...], keywords: Mapping[str, Any], _result: Any) -> None:
    named = dict(zip(("self", "data", "step"), arguments, strict=False)) | dict(keywords)
    numbers = {name: float(value) for name, value in named["data"].items() if is_number(value)}
    for run in ACTIVE:
        run.start()
        run.client.log_scalars(int(named["step"]), numbers)
        rate = numbers.get("actor/lr")
        if rate is not None and run.feed is not None:
            run.feed.acknowledge(int(named["step"]), rate)


def _send_scale(arguments: tuple[Any, ...], _keywords: Any) -> None:
    trainer, batch = arguments
    for run in ACTIVE:
        if run.feed is not None:
            batch.meta_info[SCALE_KEY] = run.feed.scale(int(trainer.global_steps))


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
