"""TRL: `ForeshockCallback` logs what a `GRPOTrainer` or `RLOOTrainer` samples and applies the learning-rate advice.

    from foreshock.integrations.trl import ForeshockCallback

    trainer = GRPOTrainer(...)
    trainer.add_callback(ForeshockCallback(trainer))

Step N is the optimizer step after which TRL logs `step: N`. Rollouts are logged at the end of the first optimizer step
that uses them. Every process logs its own shard; process 0 reports the rest and asks for the advice.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from foreshock.client.client import Client
from foreshock.client.reporting import LogOnce
from foreshock.fingerprint import dtype_name, with_precision
from foreshock.integrations import corrections
from foreshock.integrations.hooks import guard, observe
from foreshock.integrations.trainer_run import TrainerRun
from foreshock.integrations.trl_generations import Generations
from foreshock.integrations.trl_update import MOST_ROLLOUTS, Update
from foreshock.learning_rate.advice import Advice
from foreshock.learning_rate.apply import applied_learning_rates
from foreshock.learning_rate.levers import Rollback
from foreshock.learning_rate.modes import AdviceMode
from foreshock.model_kind import model_kind_of_configuration
from foreshock.parsing import parse_json
from foreshock.rollouts.attributes import BatchAttributes

__all__ = ["ADVICE_FILE", "ForeshockCallback"]

# The newest advice, in each checkpoint: a trainer that resumes from it has its scale before the service answers.
ADVICE_FILE = "foreshock_advice.json"

# TRL's `kl` is the one to the reference model, another quantity than Foreshock's.
_RENAMED = {"kl": "kl_to_reference"}

_logger = logging.getLogger(__name__)


class ForeshockCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types.
    """Connects one trainer to Foreshock; nothing here raises into the trainer.

    Args:
        trainer: the `GRPOTrainer` or `RLOOTrainer`, before `train()`.
        run_key: your permanent name of the run; None: `FORESHOCK_RUN_KEY`, else `args.run_name`.
        advice_mode: "apply" multiplies the learning rate by the advised scale; "shadow" only shows the advice.
            None: "shadow" for a new run; a restart keeps the run's mode.
        correction_mode: "apply" sets the advised correction of the loss in the trainer.
        weights_root: the workers' name of the folder `args.output_dir`. With it, every checkpoint that TRL saves is
            announced, and a checkpoint that the service asks for is saved; so that steps can be replayed.
        notary: compare the weights of each process's vLLM (`vllm_mode="colocate"`, no tensor parallelism) with the
            trainer's after each sync. The parameters are gathered once more for it if they are sharded.
        update_rollouts: most rollouts that are scored once more after each update, for `update_k3`; 0: none.
        on_rollback: called in each proposed rollback, once; what it raises refuses it. `rollback_mode="apply"` is
            needed too.
        client: a Client, which the caller closes; None: one of each `train()`, with `FORESHOCK_URL` and
            `FORESHOCK_API_KEY`.
        description: further arguments of `Client.start_run`, such as `hardware`.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        run_key: str | None = None,
        advice_mode: AdviceMode | None = None,
        correction_mode: AdviceMode | None = None,
        weights_root: str | None = None,
        notary: bool = False,
        update_rollouts: int = MOST_ROLLOUTS,
        on_rollback: Callable[[Rollback], object] | None = None,
        client: Client | None = None,
        **description: Any,
    ) -> None:
        self._log = LogOnce("foreshock.integrations.trl")
        self._trainer = trainer
        self._description = {"advice_mode": advice_mode, "correction_mode": correction_mode, **description}
        self._on_rollback = on_rollback
        self._attributes = BatchAttributes()
        self._weights_root = weights_root
        self._given_client = client
        self._run_key = run_key
        self._resumed_from: Path | None = None
        self._run = TrainerRun("TRL", self._log, corrections.of_trl(trainer))
        self._run.planned = lambda: trainer.state.max_steps if trainer.state.max_steps > 0 else None
        self._applied: float | None = None
        self._update = Update(trainer, self._log, update_rollouts)
        self._generations = Generations(trainer, self._log, self._update)
        self._guarded("observe the trainer", self._observe)
        if notary:
            self._guarded("observe the weight sync", self._observe_sync)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the run, or a new attempt of it."""
        self._guarded("start the run", lambda: self._start(args, state))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Apply the advised scale to the step that begins; all processes apply that of process 0."""
        self._guarded("apply the advice", lambda: self._apply(state.global_step + 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the rollouts that the step was the first to use; save a checkpoint if the service asks for it."""
        self._guarded("log rollouts", lambda: self._log_rollouts(state.global_step))
        self._guarded("measure the update", lambda: self._log_update(state.global_step))
        self._guarded("save a wanted checkpoint", lambda: self._save_wanted(control, state.global_step + 1))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Log the trainer's own metrics."""
        if state.is_world_process_zero and logs:
            self._guarded("log metrics", lambda: self._log_metrics(state, logs))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the advice in the checkpoint, and announce its weights."""
        if state.is_world_process_zero:
            self._guarded("announce a checkpoint", lambda: self._announce(args, state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the run as finished and deliver what is left."""
        self._guarded("end the run", lambda: self._end(finished=state.global_step >= state.max_steps))

    def _guarded(self, what: str, function: Callable[[], None]) -> None:
        guard(function, self._log, f"ForeshockCallback: {what}")

    def _observe(self) -> None:
        self._generations.observe()
        trainer = self._trainer
        own_rate = trainer._get_learning_rate

        def learning_rate() -> float:
            """Return the rate that was applied, for TRL's own log."""
            return own_rate() if self._applied is None else self._applied

        trainer._get_learning_rate = learning_rate
        observe(trainer, "_inner_training_loop", self._log, before=self._note_resume)

    def _note_resume(self, _arguments: Any, keywords: Mapping[str, Any]) -> None:
        folder = keywords.get("resume_from_checkpoint")
        self._resumed_from = None if folder is None else Path(folder)

    def _observe_sync(self) -> None:
        generation = self._trainer.vllm_generation
        if generation.mode != "colocate" or generation.tensor_parallel_size != 1:
            raise ValueError("notary=True needs vllm_mode='colocate' without tensor parallelism; see docs/doctor.md")
        own_sync = generation.sync_weights

        def sync_weights() -> None:
            own_sync()
            self._guarded("compare the weights", lambda: self._log_weights(generation))

        generation.sync_weights = sync_weights

    def _log_weights(self, generation: Any) -> None:
        """Log what TRL sent to vLLM, and what vLLM holds now; the weights sample the step that begins."""
        from foreshock.notary import ask_vllm, held_by_worker, tensors_of

        accelerator = self._trainer.accelerator
        sent = tensors_of(generation._iter_named_params(), generation.llm.llm_engine.model_config.dtype)
        if self._run.client is not None:
            self._run.client.log_weights(
                self._trainer.state.global_step + 1,
                trainer=sent if accelerator.is_main_process else None,
                engines={str(accelerator.process_index): ask_vllm(generation.llm, held_by_worker)},
                engines_in_all=accelerator.num_processes,
            )

    def _start(self, args: Any, state: Any) -> None:
        import trl

        # After an error training starts again without an end, also after that of `auto_find_batch_size` in older
        # releases.
        self._forget_start()
        name = self._run_key or os.environ.get("FORESHOCK_RUN_KEY") or getattr(args, "run_name", None)
        # Another `train()` is another attempt of the same run.
        self._run_key = self._run.connect(name, self._run.client or self._given_client).run_key
        configuration = self._trainer.model.config
        description = {
            "model": configuration.name_or_path or None,
            "trainer": f"TRL {trl.__version__} {type(self._trainer).__name__}",
            "engine": self._generations.engine_name(),
            "initial_learning_rate": float(args.learning_rate),
            "length_cap": getattr(args, "max_completion_length", None),
            "model_kind": model_kind_of_configuration(configuration.to_dict()),
            **_precision(self._trainer),
            **self._description,
        }
        accelerator = self._trainer.accelerator
        known = self._generations.attributes()
        fingerprint = with_precision(known.trainer_fingerprint, _precision(self._trainer))
        self._attributes = replace(known, trainer_fingerprint=fingerprint)
        leads = state.is_world_process_zero
        self._run.start(
            state.global_step + 1,
            leads=leads,
            saved=self._saved_advice() if leads and state.global_step > 0 else None,
            **description,
            shard=accelerator.process_index,
            shards=accelerator.num_processes,
            attributes=known,
        )
        if self._run.feed is not None and self._on_rollback is not None:
            self._run.feed.on_rollback(self._on_rollback)

    def _saved_advice(self) -> dict[str, Any] | None:
        """Return the advice in the checkpoint. The folder may be another run's: any answer to this attempt is newer."""
        path = None if self._resumed_from is None else self._resumed_from / ADVICE_FILE
        try:
            saved = parse_json(path.read_text())["advice"] if path is not None and path.is_file() else None
            return saved and {"advice": Advice.from_json({**saved, "attempt": 0, "revision": 0}).to_json()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._log.warning("saved advice", f"the advice in {path} cannot be read: {error!r}")
            return None

    def _of_first_process(self, value: Any) -> Any:
        """Return process 0's `value` in all processes; each of them calls this in the same hook of the same step."""
        if self._trainer.accelerator.num_processes == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def _apply(self, step: int) -> None:
        feed, optimizer = self._run.feed, self._trainer.optimizer
        if feed is not None:
            feed.rollback(step)
        scale, correction = self._of_first_process(self._run.decisions(step))
        self._run.correct(correction, step)
        self._run.apply(optimizer, scale, step)
        self._applied = applied_learning_rates(optimizer)[0]

    def _save_wanted(self, control: Any, next_step: int) -> None:
        """Let all processes save a checkpoint if the service asks for the weights of the next step."""
        # Saving is a collective, and only process 0 follows the requests. They are read at the end of the step: if
        # every step is asked for, a request arrives during the step before.
        wanted = None
        if self._run.feed is not None and self._run.client is not None and self._weights_root is not None:
            wanted = self._run.client.want_weights_at_step
        control.should_save |= self._of_first_process(wanted) == next_step

    def _log_rollouts(self, step: int) -> None:
        accelerator = self._trainer.accelerator
        taken = self._generations.take()
        if self._run.client is None:
            return
        shards = len(taken) * accelerator.num_processes
        for number, rollouts in enumerate(taken):
            shard = accelerator.process_index * len(taken) + number
            columns = rollouts.columns(step, number)
            attributes = replace(self._attributes, trainer_weights_version=rollouts.weights_version)
            self._run.log_columns(step, columns, shard=shard, shards=shards, attributes=attributes, copy=False)

    def _log_update(self, step: int) -> None:
        moved = self._update.measure()
        if moved is not None and self._run.client is not None:
            self._run.client.log_scalars(step, {"update_k3": moved})

    def _log_metrics(self, state: Any, logs: Mapping[str, Any]) -> None:
        if self._run.client is not None:
            self._run.log_metrics(state.global_step, {_RENAMED.get(name, name): value for name, value in logs.items()})

    def _announce(self, args: Any, step: int) -> None:
        name = f"checkpoint-{step}"
        folder = Path(args.output_dir) / name
        if self._run.feed is not None:
            (folder / ADVICE_FILE).write_text(json.dumps(self._run.feed.state_dict()))
        if self._run.client is not None and self._weights_root is not None:
            self._run.client.log_checkpoint(
                step + 1, root=self._weights_root, path=name, local_folder=folder, weights_version=step
            )

    def _forget_start(self) -> None:
        """Close the feed, and forget the applied rate and rollouts that were not logged."""
        feed, self._run.feed, self._applied = self._run.feed, None, None
        self._generations.take()
        if feed is not None:
            feed.close()

    def _end(self, *, finished: bool) -> None:
        leads, client = self._run.feed is not None, self._run.client
        # The next `train()` of this trainer starts another attempt, with the rate that TRL has.
        self._run.client = None
        self._forget_start()
        if client is not None:
            if leads and finished:
                client.finish()
            if client is self._given_client:
                client.flush()
            else:
                client.close()


def _precision(trainer: Any) -> dict[str, str | None]:
    """Return the trainer's precision as the arguments of `Client.start_run`: accelerate casts, TRL casts the head."""
    mixed = dtype_name(trainer.accelerator.mixed_precision)
    return {
        "master_dtype": dtype_name(trainer.model.dtype),
        "autocast": mixed if mixed != "float32" else None,
        "head_dtype": "float32" if getattr(trainer.args, "cast_lm_head_to_fp32", False) else None,
    }
