"""Faults of a real vLLM: it samples on this machine's CPU, and what it reports is logged.

The faults are options of the engine, sampling parameters, the folder of weights it loads, or the prompts it gets. One
engine samples for all cases of its model and options; it runs in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.doctor import inject
from benchmarks.doctor.case import Case, Fault
from benchmarks.doctor.lab import LONGEST, Pass, Rows, prompts_of, save, score, updated

_PROCESSED = {"logprobs_mode": "processed_logprobs"}
_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_running: dict[str, Any] = {}
"""In the engines' process: the newest engine, by its folder and options."""


def engine_fields(kind: str) -> dict[str, Any]:
    """Return fields of a model's configuration that vLLM needs on a CPU: heads and the width in multiples of 32."""
    wide = {"hidden_size": 128, "initializer_range": 0.15} if kind == "biases" else {}  # its heads divide the width
    return {"head_dim": 32, "hidden_size": 64} | wide


class Asked(NamedTuple):
    """What an engine samples: `reload` is a folder of weights that it loads after its start."""

    folder: Path
    options: Mapping[str, Any]
    prompts: Sequence[list[int]]
    responses: int
    parameters: Mapping[str, Any]
    reload: Path | None = None


@cache
def _process() -> ProcessPoolExecutor:
    os.environ |= _VARIABLES
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _sampled(asked: Asked) -> Rows:
    """Return what vLLM samples and reports."""
    import vllm

    key = repr((asked.folder, sorted(asked.options.items()), asked.reload))
    if key not in _running:
        _running.clear()
        _running[key] = vllm.LLM(
            str(asked.folder),
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            generation_config="vllm",
            max_model_len=128,
            disable_log_stats=True,
            **({"dtype": "bfloat16"} | dict(asked.options)),
        )
        if asked.reload is not None:
            _running[key].collective_rpc("reload_weights", kwargs={"weights_path": str(asked.reload)})
    parameters = {"max_tokens": LONGEST, "stop_token_ids": [1], "logprobs": 0, "detokenize": False, "temperature": 1.0}
    outputs = _running[key].generate(
        [vllm.TokensPrompt(prompt_token_ids=each) for each in asked.prompts],
        vllm.SamplingParams(n=asked.responses, **(parameters | dict(asked.parameters))),
        use_tqdm=False,
    )
    rows = Rows([], [], [], [])
    for group, output in enumerate(outputs):
        for each in output.outputs:
            rows.prompts.append(asked.prompts[group])
            rows.responses.append(list(each.token_ids))
            pairs = zip(each.token_ids, each.logprobs, strict=True)
            rows.mu.append(np.array([found[token].logprob for token, found in pairs], np.float32))
            rows.groups.append(group)
    return rows


def sampled(
    parameters: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    edit: Callable[[Case, list[int]], list[int]] = lambda case, prompt: prompt,
    model: Callable[[Case], Any] = lambda case: case.model,
    reloaded: bool = False,
    how: Pass | None = None,
) -> Callable[[Case], None]:
    """Return an engine with options and sampling parameters; `reloaded`: it gets the right weights after its start.

    The logged prompts start with equal ids, and the engine gets them as `edit` returns them. `model` returns the model
    whose folder the engine loads, `how` is the trainer's pass.
    """
    chosen = _PROCESSED if options is None else options

    def inject_into(case: Case) -> None:
        case.size, case.resample = 1, sampled()
        held, root = model(case), Path(_root().name)
        folder = _saved(held, root / f"{case.kind}_{'announced' if held is case.model else 'older'}")
        prompts = prompts_of(case.model, case.seed, case.prompts)
        prompts = [[*prompts[0][:5], *each] for each in prompts]
        given = [edit(case, each) for each in prompts]
        announced = _saved(case.model, root / f"{case.kind}_announced") if reloaded else None
        asked = Asked(folder, {**chosen, "seed": 0}, given, case.responses, parameters or {}, announced)
        case.rows = _process().submit(_sampled, asked).result()
        case.rows.prompts = [prompts[group] for group in case.rows.groups]
        case.pi = score(case.model, case.rows, how)

    return inject_into


def _saved(model: Any, folder: Path) -> Path:
    """Save a model, unless an engine may have its files open."""
    return folder if folder.exists() else save(model, folder)


def _older(case: Case) -> Any:
    """Move the known older weights away, equally in each case of a model, and return them."""
    case.old = updated(case.model, 0, 0.1)
    return case.old


def _raw(heat: float) -> Callable[[Case], None]:
    """The engine reports raw log-probs, the trainer applies the declared temperature."""

    def inject_into(case: Case) -> None:
        sampled({"temperature": heat}, {}, how=Pass(process=lambda logits, *_: logits / heat))(case)
        case.attributes = {"temperature": heat, "logprobs_mode": "raw_logprobs"}

    return inject_into


def _overrides(**fields: Any) -> Callable[[Case], None]:
    return sampled(options=_PROCESSED | {"hf_overrides": fields})


def _fault(
    name: str, causes: str, kind: str, how: Callable[[Case], None], side: str = "rollout", **values: float
) -> Fault:
    words = {word.replace("_", " "): value for word, value in values.items()}
    return Fault(name, side, tuple(causes.split()), how, (kind,), ({}, words, {}))


ENGINE_FAULTS: tuple[Fault, ...] = (
    _fault("temperature 0.7", "temperature", "random", sampled({"temperature": 0.7}), temperature=0.7),
    _fault("temperature 1.3", "temperature", "gemma", sampled({"temperature": 1.3}), temperature=1.3),
    _fault("top-p 0.8", "top_p", "tied", sampled({"top_p": 0.8}), top_p=0.8),
    _fault("top-k 8", "top_k", "moe", sampled({"top_k": 8}), top_k=8),
    _fault("min-p 0.1", "min_p", "biases", sampled({"min_p": 0.1}), min_p=0.1),
    _fault(
        "repetition 1.2", "repetition_penalty", "random", sampled({"repetition_penalty": 1.2}), repetition_penalty=1.2
    ),
    _fault("presence 0.8", "presence_penalty", "tied", sampled({"presence_penalty": 0.8})),
    _fault("frequency 0.5", "frequency_penalty presence_penalty", "biases", sampled({"frequency_penalty": 0.5})),
    _fault("logit bias of one id", "token_bias", "moe", sampled({"logit_bias": {5: 2.0}})),
    _fault("an id not allowed", "token_bias", "gemma", sampled({"allowed_token_ids": [*range(5), *range(6, 64)]})),
    _fault(
        "min_tokens, three stop ids", "banned_end", "random", sampled({"min_tokens": 10, "stop_token_ids": [1, 3, 6]})
    ),
    _fault(
        "min_tokens, six stop ids", "banned_end", "biases",
        sampled({"min_tokens": 14, "stop_token_ids": [1, 3, 6, 9, 12, 15]}),
    ),
    _fault(
        "temperature + top-p", "sampling", "biases", sampled({"temperature": 0.7, "top_p": 0.9}),
        temperature=0.7, top_p=0.9,
    ),
    _fault(
        "temperature + top-k", "sampling", "tied", sampled({"temperature": 0.8, "top_k": 10}),
        temperature=0.8, top_k=10,
    ),
    _fault(
        "temperature + repetition", "sampling", "gemma", sampled({"temperature": 0.8, "repetition_penalty": 1.2}),
        temperature=0.8, repetition_penalty=1.2,
    ),
    _fault(
        "top-p + presence", "sampling", "random", sampled({"top_p": 0.9, "presence_penalty": 0.8}),
        top_p=0.9, presence_penalty=0.8,
    ),
    _fault("BOS twice", "bos", "tied", sampled(edit=inject.bos_twice)),
    _fault("BOS of the engine only", "bos", "random", sampled(edit=inject.another_bos)),
    _fault("first prompt tokens missing", "prompt_start", "moe", sampled(edit=inject.first_cut), first=2),
    _fault("last prompt tokens missing", "prompt_end", "biases", sampled(edit=inject.last_cut)),
    _fault("prompts truncated", "prompt_truncated", "gemma", sampled(edit=inject.truncated)),
    _fault("a system prompt missing", "prompt_start", "biases", sampled(edit=inject.prefix_cut), first=5),
    _fault("temperature in a trained model", "temperature", "trained", sampled({"temperature": 0.7}), temperature=0.7),
    _fault(
        "temperature + top-p in a trained model", "sampling", "trained", sampled({"temperature": 0.7, "top_p": 0.9}),
        temperature=0.7, top_p=0.9,
    ),
    _fault("older weights", "other_weights", "random", sampled(model=_older)),
    _fault("older weights of a mixture", "other_weights", "moe", sampled(model=_older)),
    _fault("a tied head stale after a reload", "part_of_weights", "tied", sampled(model=_older, reloaded=True)),
    _fault(
        "rope_theta 1e5", "rope_theta", "random",
        _overrides(rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
    ),
    _fault("rms_norm_eps 0.01", "norm_eps", "biases", _overrides(rms_norm_eps=1e-2)),
    _fault("soft cap of the logits off", "soft_caps", "gemma", _overrides(final_logit_softcapping=None)),
    _fault("head tied", "tied_head", "random", _overrides(tie_word_embeddings=True)),
    _fault("one expert", "experts", "moe", _overrides(num_experts_per_tok=1)),
    _fault("FP8 cache", "kv_cache", "random", sampled(options=_PROCESSED | {"kv_cache_dtype": "fp8"})),
    _fault("raw, temperature declared", "temperature", "tied", _raw(0.8), "both"),
    _fault("raw, top-k", "top_k", "random", sampled({"top_k": 6}, {})),
    _fault("healthy", "", "random", sampled()),
    _fault("healthy", "", "tied", sampled()),
    _fault("healthy", "", "moe", sampled()),
    _fault("healthy", "", "trained", sampled()),
    _fault("healthy", "", "biases", sampled()),
    _fault("healthy", "", "gemma", sampled()),
    _fault("healthy, float32", "", "moe", sampled(options=_PROCESSED | {"dtype": "float32"})),
    _fault("healthy, float32", "", "gemma", sampled(options=_PROCESSED | {"dtype": "float32"})),
)  # fmt: skip
"""Faults, and healthy cases without a cause, by a real vLLM."""
