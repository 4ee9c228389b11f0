"""verl's v1 trainers (`verl.trainer.ppo.v1`), whose batches are keys of a TransferQueue.

- `_compute_old_log_prob`: the advised correction is set before it; the response mask before rejection sampling, if
  that is configured;
- `_compute_advantage`: the batch's tokens, log-probs, rewards and advantages are read from the queue and logged;
- `_update_actor`: the advised scale travels to the workers in the batch's `extra_info`.

A step with several updates between two weight syncs (`parameter_sync_step`) is logged in as many shards.
"""

import functools
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.integrations.hooks import fits, observe
from foreshock.integrations.verl import (
    VerlRun,
    announce_checkpoint,
    current_run,
    log,
    missing,
    observe_class,
    one_version_each,
    send_scale,
    set_correction,
)

_METHODS = ("fit", "_compute_old_log_prob", "_compute_advantage", "_update_actor", "_save_checkpoint")
_TOKENS = {
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "trainer_log_probs",
    "entropy": "entropy",
    "advantages": "advantage",
    "response_mask": "response_mask",
}


def observe_v1_trainer(module: ModuleType) -> None:
    """Observe `PPOTrainer` of `verl.trainer.ppo.v1.trainer_base`, the base of its trainers of all modes."""
    trainer_class = getattr(module, "PPOTrainer", None)
    if missing(trainer_class, _METHODS):
        return
    observe_class(trainer_class)
    observe(trainer_class, "_compute_old_log_prob", log, before=set_correction, after=_note_mask)
    observe(trainer_class, "_compute_advantage", log, after=_log_rollouts)
    observe(trainer_class, "_update_actor", log, before=functools.partial(send_scale, carrier="extra_info"))
    observe(trainer_class, "_save_checkpoint", log, after=_announce)


def _note_mask(arguments: tuple[Any, ...], _keywords: Any, _result: Any) -> None:
    trainer, batch = arguments[:2]
    correction = trainer.config.algorithm.get("rollout_correction", None) or {}
    run = current_run()
    if run is not None:
        # Rejection sampling changes the mask later; the tokens that it rejects were sampled too.
        run.response_mask = _get(batch, ["response_mask"]) if correction.get("rollout_rs", None) else None


def _log_rollouts(arguments: tuple[Any, ...], _keywords: Any, _result: Any) -> None:
    trainer, batch = arguments[:2]
    run = current_run()
    if run is not None:
        run.begin()
        _log_batch(run, trainer, batch)


def _log_batch(run: VerlRun, trainer: Any, batch: Any) -> None:
    step = int(trainer.global_steps)
    data = _get(batch, ["prompts", "responses", "rm_scores", "uid", "data_source", *_TOKENS])
    if run.response_mask is not None:
        data["response_mask"] = run.response_mask["response_mask"]
        run.response_mask = None
    tags = [tag for tag in batch.tags if not tag.get("is_padding", False)]
    ends = ([tag.get(name) for tag in tags] for name in ("min_global_steps", "max_global_steps"))
    columns = _columns_of(data, one_version_each(*ends))
    run.log_batch(
        step,
        columns,
        shard=int(trainer.local_trigger_step),
        shards=int(trainer.parameter_sync_step),
        # The weights that were synced at the end of step N are version N.
        attributes=run.attributes(step - 1),
    )


def _columns_of(data: Any, versions: NDArray[np.int32] | None) -> dict[str, Any]:
    """Return the columns of jagged tensors."""
    names = set(data.keys())
    offsets = data["responses"].offsets().cpu().numpy()
    columns: dict[str, Any] = {
        "prompt_token_ids": data["prompts"].values().cpu(),
        "prompt_offsets": data["prompts"].offsets().cpu().numpy(),
        "response_token_ids": data["responses"].values().cpu(),
        "response_offsets": offsets,
    }
    for name, column in _TOKENS.items():
        if name in names and fits("verl", column, np.diff(data[name].offsets().cpu()), np.diff(offsets), log):
            columns[column] = data[name].values().detach().cpu()
    if "rm_scores" in names:
        scores = data["rm_scores"]
        totals = np.concatenate([np.zeros(1), np.cumsum(scores.values().double().cpu().numpy())])
        columns["reward"] = np.diff(totals[scores.offsets().cpu().numpy()]).astype(np.float32)
    for name, column in (("uid", "group_id"), ("data_source", "data_source")):
        if name in names:
            columns[column] = [str(each) for each in data[name].tolist()]
    if versions is not None:
        columns["weights_version"] = np.repeat(versions, np.diff(offsets))
    return columns


def _get(batch: Any, fields: list[str]) -> Any:
    """Return fields of the batch's rollouts from the queue, without the rows that verl added as padding.

    A field that no rollout has is left out, as in verl's own reads.
    """
    import transfer_queue

    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    return transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)


def _announce(arguments: tuple[Any, ...], keywords: Any, result: Any) -> None:
    # Asynchronous trainers sample the next step partly with older weights.
    if arguments[0].trainer_mode == "sync":
        announce_checkpoint(arguments, keywords, result)
