"""verl: observe its PPO trainer on the driver, and apply the advice in its workers.

Nothing is called by the user. verl loads the entry point `verl.plugins: foreshock` (`verl_plugin.py`) in every process;
with `FORESHOCK_URL` set, `RayPPOTrainer` is observed when it is imported (its v1 trainers by `verl_v1.py`). The run
begins at the first observed call after a trainer of that class, or of one derived from it, was made; a `fit` of any
name may have made the call:

- `_compute_old_log_prob`: the advised correction is set before it; the response mask before rejection sampling, and
  the entropies;
- `compute_advantage`: the batch with log-probs, rewards and advantages, which is logged;
- `Tracking.log`: verl's metrics, logged under verl's names;
- `_save_checkpoint`: announced if verl saves Hugging Face weights (`checkpoint.save_contents` has "hf_model");
- `_update_actor`: the advised scale travels to the workers in the batch's `meta_info`, so all of them have the same.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.client.reporting import LogOnce
from foreshock.fingerprint import with_precision
from foreshock.integrations import corrections
from foreshock.integrations.hooks import guard, is_number, is_observed, mark_observed, observe
from foreshock.integrations.releases import KNOWN_VERSIONS, warn_of_unknown_version
from foreshock.integrations.trainer_run import TrainerRun, modes_of_environment
from foreshock.integrations.verl_columns import attributes_of, columns_of, precision_of
from foreshock.learning_rate.apply import applied_learning_rates, apply_scale
from foreshock.model_kind import model_kind_of_folder
from foreshock.rollouts.attributes import BatchAttributes

# The key of the scale in the metadata of a batch.
SCALE_KEY = "foreshock_learning_rate_scale"

log = LogOnce("foreshock.integrations.verl")


class VerlRun(TrainerRun):
    """The run of the trainer of this process."""

    def __init__(self, trainer: Any) -> None:
        super().__init__("verl", log, corrections.of_verl(trainer))
        self.trainer = trainer
        self.response_mask: Any = None
        self.entropy: Any = None
        self.planned = lambda: getattr(trainer, "total_training_steps", None)
        # What was said before concerns the release; the rest concerns this run and is forgotten with it.
        self._of_the_release = log.keys
        configuration = trainer.config.trainer
        name = f"{configuration.project_name}/{configuration.experiment_name}"
        self.client = self.connect(os.environ.get("FORESHOCK_RUN_KEY") or name)
        self._started = False

    @property
    def step(self) -> int:
        """The trainer's step. A fully asynchronous trainer counts its weight syncs, as its metrics do."""
        version = getattr(self.trainer, "current_param_version", None)
        return int(self.trainer.global_steps) if version is None else int(version) + 1

    @property
    def is_synchronous(self) -> bool:
        """True for verl's own loop: it sends the weights to engines on the same GPUs before it samples a step."""
        is_own_loop = getattr(type(self.trainer).fit, "__qualname__", "") == "RayPPOTrainer.fit"
        return (
            is_own_loop
            and _Process.depth > 0
            and bool(self.trainer.config.actor_rollout_ref.get("hybrid_engine", True))
        )

    def attributes(self, weights_version: int) -> BatchAttributes:
        """Return the attributes of a batch whose `trainer_log_probs` are of the weights that were synced as a version.

        They replace those of `Client.start_run`, which completes them by the precision.
        """
        known = attributes_of(self.trainer.config)
        precision = precision_of(self.trainer.config.actor_rollout_ref.actor)
        fingerprint = with_precision(known.trainer_fingerprint, precision)
        return replace(known, trainer_fingerprint=fingerprint, trainer_weights_version=weights_version)

    def begin(self, resume_step: int | None = None) -> None:
        """Describe the run before its first data; the trainer has loaded its checkpoint by then.

        `resume_step`: the first step of this attempt; None: the trainer's.
        """
        if self._started:
            return
        self._started = True
        configuration = self.trainer.config
        actor = configuration.actor_rollout_ref
        self.start(
            self.step if resume_step is None else resume_step,
            model=str(actor.model.path),
            trainer=f"verl {importlib.metadata.version('verl')} {actor.actor.get('strategy', '')}".strip(),
            engine=str(actor.rollout.name),
            initial_learning_rate=float(actor.actor.optim.lr),
            length_cap=actor.rollout.get("response_length", None),
            model_kind=model_kind_of_folder(str(actor.model.path)),
            **precision_of(actor.actor),
            **modes_of_environment(),
            shard=0,
            shards=1,
            attributes=attributes_of(configuration),
        )

    def log_batch(self, step: int, columns: dict[str, Any], **shard: Any) -> None:
        """Log the columns of a batch, and warn if log-probs of a side are missing."""
        self.warn_of_missing_log_probs(
            columns,
            "batch has no rollout_log_probs (set actor_rollout_ref.rollout.calculate_log_probs=True)",
            "batch has no old_log_probs that fit",
        )
        self.log_columns(step, columns, **shard)

    def end(self, *, failed: bool) -> None:
        """Mark the run as finished or failed and deliver what is left."""
        if self.feed is not None:
            self.feed.close()
        if self.client is not None:
            if self._started:
                self.client.finish(failed=failed)
            self.client.close()
        log.forget_all_but(self._of_the_release)


class _Process:
    """The trainer that this process made last, its run after the first observed call, and the depth of `fit` calls."""

    trainer: Any = None
    run: VerlRun | None = None
    depth = 0


def current_run() -> VerlRun | None:
    """Return the run of this process's trainer, begun if there is none; None without a trainer."""
    if _Process.run is None and _Process.trainer is not None:
        _Process.run = VerlRun(_Process.trainer)
    return _Process.run


def _note_trainer(trainer: Any) -> None:
    if trainer is not _Process.trainer:
        _end_run(failed=False)
        _Process.trainer = trainer


def _end_run(*, failed: bool) -> None:
    run, _Process.run, _Process.trainer = _Process.run, None, None
    if run is not None:
        guard(functools.partial(run.end, failed=failed), log, f"{type(run.trainer).__name__}.fit")


def observe_class(trainer_class: Any) -> None:
    """Note each trainer of this class, or of one derived from it, when it is made; end its run with its `fit`.

    A derived trainer may call neither `__init__` nor `fit` of its base.
    """
    if is_observed(trainer_class, "__new__"):
        return

    def new(cls: Any, *_arguments: Any, **_keywords: Any) -> Any:
        trainer = object.__new__(cls)
        _note_trainer(trainer)
        return trainer

    def init_subclass(cls: Any, /, **keywords: Any) -> None:
        super(trainer_class, cls).__init_subclass__(**keywords)
        guard(functools.partial(_observe_fit, cls), log, cls.__name__)

    mark_observed(new)
    trainer_class.__new__ = new
    trainer_class.__init_subclass__ = classmethod(init_subclass)
    _observe_fit(trainer_class)


def _observe_fit(trainer_class: Any) -> None:
    original = getattr(trainer_class, "fit", None)
    if not callable(original) or is_observed(trainer_class, "fit"):
        return

    module = __name__

    # Ray pickles the class of an actor with these functions and what they refer to: they find the trainer of the
    # process that runs them by the module's name.
    @functools.wraps(original)
    def fit(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with importlib.import_module(module).fitting(self):
            return original(self, *arguments, **keywords)

    @functools.wraps(original)
    async def fit_async(self: Any, *arguments: Any, **keywords: Any) -> Any:
        with importlib.import_module(module).fitting(self):
            return await original(self, *arguments, **keywords)

    observed = fit_async if inspect.iscoroutinefunction(original) else fit
    mark_observed(observed)
    trainer_class.fit = observed


@contextlib.contextmanager
def fitting(trainer: Any) -> Iterator[None]:
    """Note the trainer, and end its run with the outermost of these blocks."""
    _note_trainer(trainer)
    _Process.depth += 1
    failed = True
    try:
        yield
        failed = False
    finally:
        _Process.depth -= 1
        if _Process.depth == 0:
            _end_run(failed=failed)


def missing(trainer_class: Any, methods: tuple[str, ...]) -> bool:
    """Return True, with a warning, if a trainer class of this release lacks one of the observed methods."""
    absent = [name for name in methods if not callable(getattr(trainer_class, name, None))]
    if absent:
        name = getattr(trainer_class, "__name__", "the trainer")
        log.warning(
            f"methods of {name}",
            f"verl {importlib.metadata.version('verl')}: {name} has no {absent[0]}, so rollouts are not logged; "
            f"metrics are. Known versions: {KNOWN_VERSIONS['verl']}.",
        )
    return bool(absent)


def announce_checkpoint(_arguments: Any, _keywords: Any, _result: Any) -> None:
    """Announce the Hugging Face weights that verl saved after the update of a step; they sample the next one.

    With engines on GPUs of their own older weights sample it, so nothing is announced.
    """
    root, run = os.environ.get("FORESHOCK_WEIGHTS_ROOT"), current_run()
    if run is None or not run.trainer.config.actor_rollout_ref.get("hybrid_engine", True):
        return
    path = f"global_step_{run.step}/actor/huggingface"
    folder = Path(str(run.trainer.config.trainer.default_local_dir)) / path
    if root and run.client is not None and any(folder.glob("*.safetensors")):
        run.client.log_checkpoint(run.step + 1, root=root, path=path, local_folder=folder, weights_version=run.step)


_METHODS = ("fit", "_save_checkpoint")


def observe_trainer(module: ModuleType) -> None:
    """Observe `RayPPOTrainer` of `verl.trainer.ppo.ray_trainer`; warn once if this release has other methods."""
    warn_of_unknown_version("verl", log)
    trainer_class = getattr(module, "RayPPOTrainer", None)
    if missing(trainer_class, _METHODS):
        return
    observe_class(trainer_class)
    observe(trainer_class, "_save_checkpoint", log, after=announce_checkpoint)
    observe(module, "compute_advantage", log, after=_log_rollouts)
    scored = observe(trainer_class, "_compute_old_log_prob", log, before=set_correction, after=_note_forward_pass)
    if not (observe(trainer_class, "_update_actor", log, before=send_scale) and scored):
        log.warning(
            "methods",
            f"verl {importlib.metadata.version('verl')} has no _compute_old_log_prob or _update_actor: rollouts and "
            "metrics are logged; entropies are not, tokens that rejection sampling masks are left out, and the "
            "learning-rate advice is not applied.",
        )


def observe_tracking(module: ModuleType) -> None:
    """Observe `Tracking.log` of `verl.utils.tracking`."""
    observe(module.Tracking, "log", log, after=_log_metrics)


def observe_workers(module: ModuleType) -> None:
    """Apply the scale in `TrainingWorker.train_mini_batch` of `verl.workers.engine_workers`."""
    observe(module.TrainingWorker, "train_mini_batch", log, before=_apply_scale)


def set_correction(_arguments: Any, _keywords: Any) -> None:
    """Set the advised correction of the trainer's step, before the trainer computes its weights."""
    run = current_run()
    if run is not None and run.feed is not None:
        run.correct(run.feed.correction(run.step), run.step)


def _note_forward_pass(arguments: tuple[Any, ...], _keywords: Any, result: Any) -> None:
    run = current_run()
    if run is not None:
        # Rejection sampling changes the mask later; the tokens that it rejects were sampled too.
        run.response_mask = arguments[1].batch["response_mask"].clone()
        output = result[0] if isinstance(result, tuple) else result
        run.entropy = output.batch["entropys"].clone() if "entropys" in output.batch.keys() else None  # noqa: SIM118


def _log_rollouts(_arguments: Any, _keywords: Any, result: Any) -> None:
    run = current_run()
    # v1 trainers call it with columns of their own, and are observed elsewhere.
    if run is None or is_observed(run.trainer, "_compute_advantage"):
        return
    run.begin()
    columns = columns_of(result, log, response_mask=run.response_mask, entropy=run.entropy)
    run.response_mask = run.entropy = None
    if columns is None:
        return
    shard: dict[str, Any] = {}
    if hasattr(run.trainer, "current_param_version"):
        # It makes several updates between two weight syncs, all with the log-probs of the weights of the first.
        ends = (result.non_tensor_batch.get(name) for name in ("min_global_steps", "max_global_steps"))
        versions = one_version_each(*ends)
        if versions is not None:
            columns["weights_version"] = np.broadcast_to(versions[:, None], columns["response_token_ids"].shape)
        shard = {
            "shard": int(run.trainer.local_trigger_step) - 1,
            "shards": int(run.trainer.trigger_parameter_sync_step),
            "attributes": run.attributes(run.step - 1),
        }
    elif run.is_synchronous:
        columns["weights_version"] = np.full(columns["response_token_ids"].shape, run.step - 1, np.int32)
        shard = {"attributes": run.attributes(run.step - 1)}
    run.log_batch(run.step, columns, **shard)


def one_version_each(first: Any, last: Any) -> NDArray[np.int32] | None:
    """Return the version of the weights that sampled each rollout [N] from its first and its last one.

    None if a version is unknown, or, with a warning, if a rollout has several.
    """
    if first is None or last is None or any(each is None for each in (*first, *last)):
        return None
    versions = np.asarray(first, np.int32)
    if np.array_equal(versions, np.asarray(last, np.int32)):
        return versions
    log.warning(
        "mixed versions",
        "rollouts were sampled by several versions of the weights, and verl does not tell which tokens by which: "
        "weights versions are not logged for such a step, and its mismatch contains staleness",
    )
    return None


def _log_metrics(arguments: tuple[Any, ...], keywords: Mapping[str, Any], _result: Any) -> None:
    run = current_run()
    if run is None:
        return
    named = dict(zip(("self", "data", "step"), arguments, strict=False)) | dict(keywords)
    metrics, step = named["data"], int(named["step"])
    # verl validates the weights of a checkpoint before the step after it, which is the first of this attempt.
    validates = step > 0 and "training/global_step" not in metrics
    run.begin(step + 1 if validates else None)
    run.log_metrics(step, metrics)
    rate = metrics.get("actor/lr")
    if is_number(rate) and run.feed is not None:
        run.feed.acknowledge(step, float(rate))


def send_scale(arguments: tuple[Any, ...], _keywords: Any, carrier: str = "meta_info") -> None:
    """Send the advised scale along with a batch; `carrier` is the batch's mapping that workers get."""
    run = current_run()
    if run is not None and run.feed is not None:
        getattr(arguments[1], carrier)[SCALE_KEY] = run.feed.scale(run.step)


def _apply_scale(arguments: tuple[Any, ...], _keywords: Any) -> None:
    from verl.utils import tensordict_utils

    worker, data = arguments
    scale = tensordict_utils.get(data, key=SCALE_KEY, default=None)
    optimizer = getattr(worker.engine, "optimizer", None)
    if scale is None or optimizer is None or not apply_scale(optimizer, float(scale)):
        return
    engine = worker.engine
    own_step = type(engine).lr_scheduler_step

    def lr_scheduler_step() -> Any:
        """Step the scheduler, and return the rate that the optimizer's next step has, for verl's metric `actor/lr`."""
        own_step(engine)
        return applied_learning_rates(optimizer)[0]

    engine.lr_scheduler_step = lr_scheduler_step
