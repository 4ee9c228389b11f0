"""The columns and attributes of a verl batch."""

from typing import Any

from foreshock.fingerprint import dtype_name
from foreshock.integrations import clip_range
from foreshock.rollouts.attributes import BatchAttributes


def columns_of(data: Any, *, response_mask: Any = None, entropy: Any = None) -> dict[str, Any]:
    """Return the columns for `Client.log_rollouts` of a `verl.DataProto` with N padded rollouts.

    `response_mask` [N, R] is the mask before rejection sampling, which changes the batch's own; None: the batch's own.
    `entropy` [N, R] is that of the forward pass which gave `old_log_probs`. Raises KeyError naming a missing tensor if
    `prompts`, `responses` or `attention_mask` is absent.
    """
    tensors, objects = data.batch, data.non_tensor_batch
    width = tensors["prompts"].shape[1]
    attention = tensors["attention_mask"]
    columns: dict[str, Any] = {
        "prompt_token_ids": tensors["prompts"],
        "prompt_padding_mask": attention[:, :width],
        "response_token_ids": tensors["responses"],
        "response_padding_mask": attention[:, width:],
        "response_mask": _first(response_mask, _optional(tensors, "response_mask")),
        "rollout_log_probs": _optional(tensors, "rollout_log_probs"),
        "trainer_log_probs": _optional(tensors, "old_log_probs"),
        "entropy": entropy,
        "advantage": _optional(tensors, "advantages"),
        "group_id": _strings(objects.get("uid")),
        "data_source": _strings(objects.get("data_source")),
        "engine_id": _strings(objects.get("engine_id")),
    }
    scores = _optional(tensors, "token_level_scores")
    if scores is not None:
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
        length_cap=rollout.get("response_length", None),
        **(clip_range("verl", actor) if loss == "vanilla" else {}),
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


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _strings(values: Any) -> list[str] | None:
    return None if values is None else [str(value) for value in values]


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if hasattr(value, "detach") else value
