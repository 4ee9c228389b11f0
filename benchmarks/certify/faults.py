"""Changes planted in a patched engine or trainer, at the size of public reports.

A change of the engine is one of its arguments, of the folder that it loads, or of its code; one of the trainer is a
change of the model that it loads. The command does not know of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from foreshock.scorers import ENGINE_DECODE, ENGINE_REPLAY

Tensors = dict[str, Any]


@dataclass(frozen=True)
class Planted:
    """A change. `causes`: the right names of the doctor's catalogue; `place`: the right words on layers, if it has
    no such variant. `rows`: the conditions that should show it.

    `overrides` changes the engine's configuration, `arguments` its arguments, `tensors` the weights that it loads,
    `patch` returns a patch of its code; `trainer` the model that the trainer loads. `model`: which of the
    benchmark's models. `delivered` is False if the engine does not get the adapter.
    """

    name: str
    causes: tuple[str, ...]
    place: str = ""
    rows: tuple[str, ...] = (f"trainer/{ENGINE_REPLAY}",)
    model: str = "qwen3"
    overrides: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    arguments: dict[str, Any] | None = None
    tensors: Callable[[Tensors], None] | None = None
    patch: Callable[[], Any] | None = None
    trainer: Callable[[Any], None] | None = None
    delivered: bool = True


@contextlib.contextmanager
def planted(fault: Planted) -> Iterator[None]:
    """Plant a change in this process, within the block."""
    from foreshock_probes.scorers import torch_forward
    from foreshock_probes.scorers.forward_pass import load_model as load
    from foreshock_probes.scorers.vllm_engine import VllmEngine

    start = VllmEngine.__init__

    def changed_start(self: Any, arguments: dict[str, Any], adapter: Path | None = None) -> None:
        arguments = dict(arguments)
        if fault.overrides is not None:
            configuration = json.loads((Path(arguments["model"]) / "config.json").read_text())
            arguments["hf_overrides"] = arguments.get("hf_overrides", {}) | fault.overrides(configuration)
        if fault.tensors is not None:
            arguments["model"] = str(_changed_folder(Path(arguments["model"]), fault))
        start(self, arguments | (fault.arguments or {}), adapter if fault.delivered else None)

    def changed_load(*arguments: Any, **named: Any) -> Any:
        model = load(*arguments, **named)
        if fault.trainer is not None:
            with torch.no_grad():
                fault.trainer(model)
        return model

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(VllmEngine, "__init__", changed_start))
        stack.enter_context(patch.object(torch_forward, "load_model", changed_load))
        if fault.patch is not None:
            stack.enter_context(fault.patch())
        yield


def _changed_folder(folder: Path, fault: Planted) -> Path:
    from safetensors.torch import load_file, save_file

    assert fault.tensors is not None
    changed = folder.with_name(f"{folder.name}-{fault.name.replace(' ', '-')}")
    if not changed.exists():
        temporary = changed.with_suffix(".part")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(folder, temporary)
        tensors = load_file(temporary / "model.safetensors")
        fault.tensors(tensors)
        save_file({name: each.contiguous() for name, each in tensors.items()}, temporary / "model.safetensors")
        temporary.rename(changed)
    return changed


def _rope(factor: float) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def overrides(configuration: Mapping[str, Any]) -> dict[str, Any]:
        rope = configuration["rope_parameters"]
        return {"rope_parameters": {**rope, "rope_theta": rope["rope_theta"] * factor}}

    return overrides


def _interpolated(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {**configuration["rope_parameters"], "rope_type": "linear", "factor": 2.0}}


def _field(**values: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda configuration: values


def _of(part: str, change: Callable[[Any], Any], count: int = 0) -> Callable[[Tensors], None]:
    """Return a change of the tensors whose name has `part`; `count`: only so many, 0: all."""

    def tensors(found: Tensors) -> None:
        names = sorted(name for name in found if part in name)
        assert names, part
        for name in names[: count or None]:
            found[name] = change(found[name])

    return tensors


def _stale(value: Any) -> Any:
    """Return a tensor as one update of reinforcement learning before: moved by a hundredth of its own spread."""
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(5))
    return value + (0.01 * value.float().std() * noise).to(value.dtype)


def _quantised(value: Any) -> Any:
    """Return a weight as int8 with a scale for each output channel gives it back."""
    scale = value.float().abs().amax(1, keepdim=True) / 127
    return (torch.round(value.float() / scale) * scale).to(value.dtype)


def _in_fp8(value: Any) -> Any:
    """Return a weight as fp8 with a scale for each output channel gives it back."""
    scale = value.float().abs().amax(1, keepdim=True) / 448
    return ((value.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(value.dtype)


def _stale_half(value: Any) -> Any:
    """Return a tensor of which the shard of one of two ranks was not updated."""
    half = value.shape[0] // 2
    return torch.cat([value[:half], _stale(value)[half:]])


def _embeddings_unscaled() -> Any:
    """Leave out Gemma's scale of embeddings, as a port of a Llama does."""
    from vllm.model_executor.models.gemma2 import Gemma2Model

    plain = Gemma2Model.__init__

    def start(self: Any, *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **named)
        self.normalizer.fill_(1.0)

    return patch.object(Gemma2Model, "__init__", start)


def _attention_scale() -> Any:
    """Scale attention scores by 5 % more, as a port with another size of heads did."""
    from vllm.model_executor.layers.attention.attention import Attention

    plain = Attention.__init__

    def start(self: Any, num_heads: int, head_size: int, scale: float, *arguments: Any, **named: Any) -> None:
        plain(self, num_heads, head_size, scale * 1.05, *arguments, **named)

    return patch.object(Attention, "__init__", start)


def _generate_with(change: Callable[[list[Any], list[Any]], None]) -> Callable[[], Any]:
    """Return a patch of what the engine is asked to generate: prompts and parameters."""

    def changed() -> Any:
        from foreshock_probes.scorers.vllm_engine import VllmEngine

        plain = VllmEngine.generate

        def generate(self: Any, prompts: list[Any], parameters: list[Any]) -> Any:
            prompts, parameters = list(prompts), list(parameters)
            change(prompts, parameters)
            return plain(self, prompts, parameters)

        return patch.object(VllmEngine, "generate", generate)

    return changed


def _first_token_lost(prompts: list[Any], parameters: list[Any]) -> None:
    """Replace the first token of sampled and decoded prompts, as a tokenizer with another start token does."""
    for row, tokens in enumerate(prompts):
        if parameters[row].prompt_logprobs is None and len(tokens) > 1:
            changed = tokens.copy()
            changed[0] = (int(tokens[0]) + 1) % 7
            prompts[row] = changed


def _sampling_with(**values: Any) -> Callable[[list[Any], list[Any]], None]:
    """Return a change of what is sampled: settings of a generation_config.json that nobody asked for."""

    def change(prompts: list[Any], parameters: list[Any]) -> None:
        for each in parameters:
            if each.temperature > 0:
                for name, value in values.items():
                    setattr(each, name, value)

    return change


def _warmer(prompts: list[Any], parameters: list[Any]) -> None:
    for each in parameters:
        each.temperature *= 1.05


def _scaled(part: str, factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, value in model.named_parameters():
            if part in name:
                value.mul_(factor)

    return change


def _epsilon_of_trainer(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def _theta_of_trainer(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq ** (math.log(1e6) / math.log(1e4))


_PENALTY = "as by a repetition, presence or frequency penalty"

PLANTED: dict[str, Planted] = {
    each.name: each
    for each in (
        Planted("attention scale 5 % larger", ("attention_scale",), patch=_attention_scale),
        Planted("rope theta 1e6 for 1e4", ("rope_theta", "configuration"), overrides=_rope(100.0)),
        Planted("norm epsilon 1e-5 for 1e-6", ("norm_eps", "configuration"), overrides=_field(rms_norm_eps=1e-5)),
        Planted(
            "biases dropped", (), place="depart first at layers.0", model="qwen2", tensors=_of("bias", torch.zeros_like)
        ),
        Planted(
            "stale tensor of one layer",
            (),
            place="depart first at layers.1",
            tensors=_of("layers.1.mlp.up_proj", _stale),
        ),
        Planted(
            "raw log-probs",
            ("temperature",),
            rows=("temperature", "top_p", "top_k"),
            arguments={"logprobs_mode": "raw_logprobs"},
        ),
        Planted(
            "first token of prompts replaced",
            ("bos", "prompt_start"),
            rows=("prefill", f"trainer/{ENGINE_DECODE}", "sampling"),
            patch=_generate_with(_first_token_lost),
        ),
        Planted(
            "one stale expert",
            (),
            place="depart first at layers.0",
            model="moe",
            tensors=_of("experts.2.", _stale, 3),
        ),
        Planted(
            "cache in fp8", ("kv_cache",), rows=(f"trainer/{ENGINE_DECODE}",), arguments={"kv_cache_dtype": "fp8_e5m2"}
        ),
        Planted("rope positions halved", ("rope_scaling", "configuration"), overrides=_interpolated),
        Planted(
            "weights of query and key norms not loaded",
            (),
            place="depart first at layers.0",
            tensors=_of("_norm.weight", torch.ones_like),
        ),
        Planted("stale head", (), place="No layer", tensors=_of("lm_head", _stale)),
        Planted(
            "one expert a token", ("experts", "configuration"), model="moe", overrides=_field(num_experts_per_tok=1)
        ),
        Planted(
            "expert weights not normalised",
            ("experts", "configuration"),
            model="moe",
            overrides=_field(norm_topk_prob=False),
        ),
        Planted(
            "repetition penalty 1.05",
            ("repetition_penalty",),
            rows=("temperature", "sampling"),
            place=_PENALTY,
            patch=_generate_with(_sampling_with(repetition_penalty=1.05)),
        ),
        Planted(
            "presence penalty 0.1",
            ("presence_penalty", "frequency_penalty"),
            rows=("temperature", "sampling"),
            place=_PENALTY,
            patch=_generate_with(_sampling_with(presence_penalty=0.1)),
        ),
        Planted(
            "top-k 50 that nobody asked for",
            ("top_k",),
            rows=("temperature", "sampling"),
            patch=_generate_with(_sampling_with(top_k=50)),
        ),
        Planted(
            "temperature 5 % higher", ("temperature",), rows=("temperature", "sampling"), patch=_generate_with(_warmer)
        ),
        Planted(
            "soft cap of logits missing",
            ("softcap", "soft_caps", "configuration"),
            model="gemma-trained",
            overrides=_field(final_logit_softcapping=None),
        ),
        Planted("embeddings not scaled", ("embedding_scale", "multipliers"), model="gemma", patch=_embeddings_unscaled),
        Planted(
            "one weight in int8",
            (),
            place="depart first at layers.1",
            tensors=_of("layers.1.mlp.down_proj", _quantised),
        ),
        Planted("MLP in fp8", ("quantised_weights",), tensors=_of("mlp.", _in_fp8)),
        Planted("attention in fp8", ("quantised_weights",), model="llama", tensors=_of("self_attn.", _in_fp8)),
        Planted(
            "half of a tensor not updated",
            (),
            place="depart first at layers.2",
            tensors=_of("layers.2.self_attn.o_proj", _stale_half),
        ),
        Planted("stale embeddings", (), place="depart first at embeddings", tensors=_of("embed_tokens", _stale)),
        Planted(
            "adapter not delivered",
            ("other_weights", "update_scaled", "part_of_weights"),
            model="qwen3-lora",
            delivered=False,
        ),
        Planted("trainer: norm epsilon 1e-5", ("norm_eps", "configuration"), trainer=_epsilon_of_trainer),
        Planted(
            "trainer: final norm 1 % larger",
            (),
            place="depart first at norm",
            trainer=_scaled("model.norm.weight", 1.01),
        ),
        Planted("trainer: rope theta 1e6 for 1e4", ("rope_theta", "configuration"), trainer=_theta_of_trainer),
        Planted("trainer: head 2 % larger", ("temperature",), trainer=_scaled("lm_head", 1.02)),
    )
}
