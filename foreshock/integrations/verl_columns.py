"""The columns and attributes of a verl batch."""

from typing import Any

from foreshock.client.reporting import LogOnce
from foreshock.fingerprint import dtype_name
from foreshock.integrations import clip_range
from foreshock.integrations.hooks import fits
from foreshock.rollouts.attributes import BatchAttributes

_TOKENS = {
    "response_mask": "response_mask",
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "trainer_log_probs",
    "advantages": "advantage",
}


def columns_of(data: Any, log: LogOnce, *, response_mask: Any = None, entropy: Any = None) -> dict[str, Any] | None:
    """Return the columns for `Client.log_rollouts` of a `verl.DataProto` with N padded rollouts.

    `response_mask` [N, R] is the mask before rejection sampling, which changes the batch's own; None: the batch's own.
    `entropy` [N, R] is that of the forward pass which gave `old_log_probs`. A column of another shape than the
    responses is left out with a warning. None, with a warning, if the tokens are unknown.
    """
    tensors, objects = data.batch, data.non_tensor_batch
    absent = [name for name in ("prompts", "responses", "attention_mask") if name not in tensors.keys()]  # noqa: SIM118
    if absent:
        log.warning("tokens", f"verl's batch has no {absent[0]}, so rollouts are not logged; metrics are")
        return None
    responses, attention = tensors["responses"], tensors["attention_mask"]
    width = tensors["prompts"].shape[1]
    if tuple(attention[:, width:].shape) != tuple(responses.shape):
        log.warning(
            "tokens",
            f"verl's batch has responses {list(responses.shape)} after prompts of {width} tokens and an attention mask "
            f"{list(attention.shape)}, so rollouts are not logged; metrics are",
        )
        return None
    own = _optional(tensors, "response_mask")
    same = (
        response_mask is None or own is None or (response_mask.shape == own.shape and not (own > response_mask).any())
    )
    if not same:
        log.warning(
            "order",
            "verl's batch was reordered or cut after its log-probs were computed: entropies are not logged, and tokens "
            "that rejection sampling masked are left out",
        )
    scored = {"response_mask": response_mask, "entropy": entropy} if same else {}
    found = {column: _optional(tensors, name) for name, column in _TOKENS.items()}
    found |= {name: value for name, value in scored.items() if value is not None}
    columns: dict[str, Any] = {
        "prompt_token_ids": tensors["prompts"],
        "prompt_padding_mask": attention[:, :width],
        "response_token_ids": responses,
        "response_padding_mask": attention[:, width:],
        "group_id": _strings(objects.get("uid")),
        "data_source": _strings(objects.get("data_source")),
        "engine_id": _strings(objects.get("engine_id")),
    }
    for name, value in found.items():
        of_rollouts = name == "advantage" and value is not None and value.ndim == 1
        expected = responses.shape[:1] if of_rollouts else responses.shape
        if value is not None and fits("verl", name, value.shape, expected, log):
            columns[name] = value
    scores = _optional(tensors, "token_level_scores")
    if scores is not None and fits("verl", "token_level_scores", scores.shape, responses.shape, log):
        columns["reward"] = scores.sum(dim=-1)
    return {name: _on_cpu(value) for name, value in columns.items() if value is not None}


def attributes_of(configuration: Any) -> BatchAttributes:
    """Return how a verl trainer with this configuration (`trainer.config`) samples and scores."""
    rollout = configuration.actor_rollout_ref.rollout
    correction = configuration.algorithm.get("rollout_correction", None) or {}
    mode = rollout.get("logprobs_mode", None)
    actor = configuration.actor_rollout_ref.actor
    # Other losses clip the ratio of a sequence, or not at all.
    loss = (actor.get("policy_loss", None) or {}).get("loss_mode", "vanilla")
    return BatchAttributes(
        temperature=rollout.get("temperature", None),
        top_p=rollout.get("top_p", None),
        top_k=rollout.get("top_k", None),
        logprobs_mode=mode if mode in ("raw_logprobs", "processed_logprobs") else None,
        trainer_policy="bypass" if correction.get("bypass_mode", False) else "recomputed_old",
        entropy_policy="trainer",
        length_cap=rollout.get("response_length", None),
        **(clip_range("verl", actor) if loss == "vanilla" else {}),
        loss_aggregation=actor.get("loss_agg_mode", None),
    )


def precision_of(actor: Any) -> dict[str, Any]:
    """Return the precision of verl's actor with this configuration, as arguments of `Client.start_run`.

    FSDP casts the weights to the dtype of its mixed precision and autocasts to the same; Megatron holds the weights in
    its own dtype. Empty for another strategy.
    """
    strategy = str(actor.get("strategy", ""))
    if strategy in ("fsdp", "fsdp2"):
        engine = actor.get("fsdp_config", None) or {}
        mixed = (engine.get("mixed_precision", None) or {}).get("param_dtype", "bf16")
        dtype = dtype_name(mixed)
        return {"master_dtype": dtype, "autocast": dtype if dtype != "float32" else None}
    if strategy == "megatron":
        return {"master_dtype": dtype_name((actor.get("megatron", None) or {}).get("dtype", "bfloat16"))}
    return {}


def _optional(tensors: Any, name: str) -> Any:
    return tensors[name] if name in tensors.keys() else None  # noqa: SIM118  # A TensorDict has no `in` of its own.


def _strings(values: Any) -> list[str] | None:
    return None if values is None else [str(value) for value in values]


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if hasattr(value, "detach") else value
