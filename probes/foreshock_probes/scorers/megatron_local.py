"""`megatron.local`: Megatron-core's own `GPTModel` in one process, with layers that do not need Transformer Engine.

Dense models of the families in `FAMILIES`, loaded from a checkpoint in Hugging Face's format. It has Megatron's
modules, order of operations and precision (weights and activations in one dtype). Kernels of Transformer Engine and
tensor, pipeline and context parallelism are not covered.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import Field

from foreshock_probes.scorers.forward_pass import CheckpointTensors
from foreshock_probes.scorers.request import (
    Options,
    Report,
    Scored,
    ScoreRequest,
    UnsupportedScoreError,
    WarmModel,
    parse_options,
)
from foreshock_probes.scorers.tokens import model_configuration
from foreshock_probes.scorers.torch_forward import Dtype, TrainerOptions, prepare_forward_pass, run_forward_pass

FAMILIES = ("llama", "qwen2", "qwen3")


class MegatronOptions(Options):
    """Options: the dtype of weights and activations, and the largest batch, rows padded on the right."""

    dtype: Dtype = "bfloat16"
    batch_size: int = Field(default=128, ge=1)
    batch_tokens: int = Field(default=16_384, ge=1)
    temperature: float | None = Field(default=None, gt=0)


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    chosen = parse_options(MegatronOptions, request).model_dump()
    # Megatron returns only whole logits.
    options = TrainerOptions(
        **{name: value for name, value in chosen.items() if name != "dtype"},
        autocast=None, master_dtype=chosen["dtype"], logits_bytes=1 << 60,
    )  # fmt: skip
    flags = {"model": f"megatron-core {version('megatron-core')} GPTModel, local layers"}
    return run_forward_pass(
        prepare_forward_pass(request, options, warm, flags, load), request.rollouts, options, report
    )


class LocalGpt:
    """A `GPTModel` with those parts of a Hugging Face model's interface that forward passes use."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = SimpleNamespace(_attn_implementation="megatron local")

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return `logits` [rows, time, V]. In a causal model, padding on the right needs no mask."""
        from megatron.core import tensor_parallel

        rows, time = input_ids.shape
        positions = torch.arange(time, device=input_ids.device).expand(rows, time)
        hidden = torch.ones(time, time, dtype=torch.bool, device=input_ids.device).triu(1)[None, None]
        # Megatron moves its rotary frequencies to the current CUDA device, whatever device the model is on, and reads
        # CUDA's random state before its dropout, which is 0 here.
        no_random_state = SimpleNamespace(fork=contextlib.nullcontext)
        with (
            warnings.catch_warnings(action="ignore"),  # about missing Apex and process groups
            _answering(torch.cuda, "current_device", input_ids.device),
            _answering(tensor_parallel, "get_cuda_rng_tracker", no_random_state),
        ):
            return SimpleNamespace(logits=self._model(input_ids, positions, hidden))

    def get_output_embeddings(self) -> Any:
        """Return the embeddings, which have the shape of the head; a tied head has no weights of its own."""
        return self._model.embedding.word_embeddings


@contextlib.contextmanager
def _answering(module: Any, name: str, answer: Any) -> Iterator[None]:
    """Within the block, make a function of a module return `answer`."""
    before = getattr(module, name)
    setattr(module, name, lambda *_: answer)
    try:
        yield
    finally:
        setattr(module, name, before)


def load(folder: Path, dtype: torch.dtype, _: str, device: torch.device) -> LocalGpt:
    """Load a checkpoint. Raises UnsupportedScoreError if its model is not of a known family or lacks a tensor."""
    with warnings.catch_warnings(action="ignore"):
        return LocalGpt(_built(folder, dtype, device).to(device, dtype).eval())


def _built(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    found = model_configuration(folder)
    if found["model_type"] not in FAMILIES:
        raise UnsupportedScoreError(f"megatron.local loads {', '.join(FAMILIES)}, got model_type {found['model_type']}")
    if not torch.distributed.is_initialized():
        store = f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    heads, groups = found["num_attention_heads"], found["num_key_value_heads"]
    size = found.get("head_dim") or found["hidden_size"] // heads
    with_norm = found["model_type"] == "qwen3"
    config = TransformerConfig(
        num_layers=found["num_hidden_layers"], hidden_size=found["hidden_size"], num_attention_heads=heads,
        num_query_groups=groups, kv_channels=size, ffn_hidden_size=found["intermediate_size"],
        normalization="RMSNorm", layernorm_epsilon=found["rms_norm_eps"], activation_func=torch.nn.functional.silu,
        gated_linear_unit=True, add_bias_linear=False, add_qkv_bias=found["model_type"] == "qwen2",
        qk_layernorm=with_norm, hidden_dropout=0.0, attention_dropout=0.0, bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16, params_dtype=dtype, pipeline_dtype=dtype, use_cpu_initialization=True,
        perform_initialization=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(qk_layernorm=with_norm, normalization="RMSNorm"), found["vocab_size"],
        found["max_position_embeddings"], position_embedding_type="rope", parallel_output=False,
        rotary_base=(found.get("rope_parameters") or found)["rope_theta"],
        share_embeddings_and_output_weights=bool(found.get("tie_word_embeddings")),
    )  # fmt: skip
    weights = _weights(CheckpointTensors(folder), found["num_hidden_layers"], groups)
    lacking, _unknown = model.load_state_dict(weights, strict=False)
    if left := [name for name in lacking if not name.endswith("_extra_state")]:
        raise UnsupportedScoreError(f"the checkpoint has nothing for {left[0]} of Megatron's model")
    return model


def _weights(checkpoint: CheckpointTensors, layers: int, groups: int) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors under Megatron's names. q, k and v are fused by group of heads, gate with up."""
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight",
             "decoder.final_layernorm.weight": "model.norm.weight"}  # fmt: skip
    parts = {"input_layernorm": "input_layernorm", "self_attention.q_layernorm": "self_attn.q_norm",
             "self_attention.k_layernorm": "self_attn.k_norm", "self_attention.linear_proj": "self_attn.o_proj",
             "pre_mlp_layernorm": "post_attention_layernorm", "mlp.linear_fc2": "mlp.down_proj"}  # fmt: skip
    for layer in range(layers):
        names |= {
            f"decoder.layers.{layer}.{own}.weight": f"model.layers.{layer}.{theirs}.weight"
            for own, theirs in parts.items()
        }
    found = {own: checkpoint.tensor(theirs) for own, theirs in names.items() if theirs in checkpoint.names}
    for layer in range(layers):
        own, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{kind}" in checkpoint.names:
                tensors = [checkpoint.tensor(f"{theirs}.self_attn.{name}_proj.{kind}") for name in "qkv"]
                by_group = [each.reshape(groups, -1, *each.shape[1:]) for each in tensors]
                found[f"{own}.self_attention.linear_qkv.{kind}"] = torch.cat(by_group, 1).flatten(0, 1)
        fused = [checkpoint.tensor(f"{theirs}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        found[f"{own}.mlp.linear_fc1.weight"] = torch.cat(fused)
    return found
