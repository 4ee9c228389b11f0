"""Injections: each changes what the engine computes, what the trainer computes or what is logged, in three sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.doctor.case import Case
from benchmarks.doctor.lab import Pass, score, updated, with_config


def changed_data(
    change: Callable[[Case, int, NDArray[np.float32], list[int]], NDArray[np.float32]], side: str
) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        assert case.rows is not None
        values = case.logged(side)
        for row, tokens in enumerate(case.rows.responses):
            values[row] = change(case, row, values[row].copy(), tokens)

    return inject


def put(values: NDArray[np.float32], where: Any, value: float) -> NDArray[np.float32]:
    values[where] = value
    return values


def shift(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    concerned = (True, row % 2 == 0, row % 5 == 0)[case.size]
    return np.concatenate([values[1:], values[:1]]) if concerned else values


def permuted(case: Case) -> None:
    """The rollouts of each length are logged in another order."""
    assert case.rows is not None
    lengths = np.array([len(each) for each in case.rows.responses])
    source = np.arange(lengths.size)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        source[rows] = np.roll(rows, 1 + case.size)
    case.pi = [case.pi[each] for each in source]


def processed(
    change: Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor],
) -> Callable[[Case], None]:
    """Return an engine that processes its logits before it samples and logs."""

    def inject(case: Case) -> None:
        case.sampled(process=lambda logits, ids, given, step: change(case, logits, ids, given, step))

    return inject


def top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(before >= top_p, -torch.inf))


def top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)


def min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def _seen(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.zeros(ids.shape[0], vocabulary).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))


def repetition(
    case: Case,
    logits: torch.Tensor,
    ids: torch.Tensor,
    given: torch.Tensor,
    step: int,
    *,
    of_response: bool = False,
) -> torch.Tensor:
    factor = (1.1, 1.25, 1.5)[case.size]
    hit = _seen(ids[:, int(given[0]) :] if of_response else ids, logits.shape[-1]) > 0
    return torch.where(hit, torch.where(logits > 0, logits / factor, logits * factor), logits)


def presence(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    response = ids[:, int(given[0]) :]
    return logits - (0.5, 1.0, 1.5)[case.size] * (_seen(response, logits.shape[-1]) > 0)


def add(logits: torch.Tensor, token: int, value: float) -> torch.Tensor:
    logits[:, token] += value
    return logits


def frequent(case: Case) -> int:
    return 9 if case.kind == "trained" else 5


def no_end(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    return add(logits, 1, -torch.inf) if step < (4, 8, 12)[case.size] else logits


def stale(case: Case) -> None:
    case.old = updated(case.model, case.seed + 1, (0.02, 0.05, 0.2)[case.size])
    case.sampled(case.old)


def mixture(case: Case) -> None:
    """Some ranks of the engine hold older weights; they sampled every second, third or fourth rollout."""
    assert case.rows is not None
    case.old = updated(case.model, case.seed + 1, 0.06)
    held = score(case.old, case.rows, Pass("bfloat16"))
    case.rows.mu = [held[row] if row % (2 + case.size) == 0 else each for row, each in enumerate(case.rows.mu)]


def in_flight(case: Case) -> None:
    """New weights arrive in the middle of each response."""
    assert case.rows is not None
    case.old = updated(case.model, case.seed + 1, 0.06)
    held = score(case.old, case.rows, Pass("bfloat16"))
    part = (0.3, 0.5, 0.7)[case.size]
    for row, values in enumerate(case.rows.mu):
        first = int(part * len(values))
        case.rows.mu[row] = np.concatenate([held[row][:first], values[first:]])


@torch.no_grad()
def prompt_cache(case: Case) -> None:
    assert case.rows is not None
    case.old = updated(case.model, case.seed + 1, (0.04, 0.08, 0.16)[case.size])
    old, new = copy.deepcopy(case.old).to(torch.bfloat16), copy.deepcopy(case.model).to(torch.bfloat16)
    for row, (prompt, response) in enumerate(zip(case.rows.prompts, case.rows.responses, strict=True)):
        past = old(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
        values = []
        for token, given in zip(response, [prompt[-1], *response[:-1]], strict=True):
            output = new(torch.tensor([[given]]), past_key_values=past, use_cache=True)
            values.append(float(output.logits[0, -1].float().log_softmax(-1)[token]))
            past = output.past_key_values
        case.rows.mu[row] = np.array(values, np.float32)


def part(pick: Callable[[str, Any], bool]) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        case.old = updated(case.model, case.seed + 1, (0.05, 0.1, 0.2)[case.size])
        engine = copy.deepcopy(case.model)
        state = {name: value for name, value in case.old.state_dict().items() if pick(name, case.model)}
        engine.load_state_dict(state, strict=False)
        case.sampled(engine)

    return inject


def twice(case: Case) -> None:
    engine = copy.deepcopy(case.model)
    case.old = updated(case.model, case.seed + 1, (0.03, 0.06, 0.12)[case.size])
    with torch.no_grad():
        for mine, before in zip(engine.parameters(), case.old.parameters(), strict=True):
            mine.add_(mine - before)
    case.sampled(engine)


def quantised(case: Case) -> None:
    engine = copy.deepcopy(case.model)
    with torch.no_grad():
        for name, value in engine.named_parameters():
            if value.dim() > 1 and "layers." in name:
                if case.size == 0:
                    scale = value.abs().amax(-1, keepdim=True) / 448
                    value.copy_((value / scale).to(torch.float8_e4m3fn).float() * scale)
                else:
                    most = 7
                    scale = value.abs().amax(-1, keepdim=True) / most
                    value.copy_((value / scale).round() * scale)
    case.sampled(engine)


def config(**sizes: tuple[Any, Any, Any]) -> Callable[[Case], None]:
    return lambda case: case.sampled(
        with_config(case.model, **{name: values[case.size] for name, values in sizes.items()})
    )


def edited(edit: Callable[[Case, dict[str, torch.Tensor]], None]) -> Callable[[Case], None]:
    """Return an engine whose tensors are edited in place."""

    def inject(case: Case) -> None:
        engine = copy.deepcopy(case.model)
        with torch.no_grad():
            edit(case, dict(engine.named_parameters()))
        case.sampled(engine)

    return inject


def swap(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    first = case.size % 2
    for name, value in tensors.items():
        if f"layers.{first}." in name:
            other = tensors[name.replace(f"layers.{first}.", f"layers.{first + 1}.")]
            kept = value.clone()
            value.copy_(other)
            other.copy_(kept)


def _ones(name_part: str, add: bool = False) -> Callable[[Case, dict[str, torch.Tensor]], None]:
    def edit(case: Case, tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if name_part in name and "_norm.weight"[1:] in name:
                value.copy_(value + 1 if add else torch.ones_like(value))

    return edit


def scored(side: str, **how: Any) -> Callable[[Case], None]:
    """Return a side that scores by a changed pass; functions of a case's size are called with it."""

    def inject(case: Case) -> None:
        values = {name: value(case) if name in ("positions", "mask") else value for name, value in how.items()}
        case.rescored(Pass(**values), side=side)

    return inject


def positions(case: Case) -> Callable[[int, int], NDArray[np.int64]]:
    zero = lambda prompt, width: np.zeros(width, np.int64)  # noqa: E731
    restart = lambda prompt, width: np.concatenate([np.arange(prompt), np.arange(width - prompt)])  # noqa: E731
    late = lambda prompt, width: np.arange(width) + (np.arange(width) >= prompt)  # noqa: E731
    return (late, restart, zero)[case.size]


def _causal(width: int) -> NDArray[np.bool_]:
    return np.asarray(np.tril(np.ones((width, width), bool)))


def mask(case: Case) -> Callable[[int, int], NDArray[np.bool_]]:
    def first(prompt: int, width: int) -> NDArray[np.bool_]:
        at = np.arange(width)
        return np.asarray(_causal(width) & ((at > 0)[None] | (at == 0)[:, None]))

    def prompt_hidden(prompt: int, width: int) -> NDArray[np.bool_]:
        at = np.arange(width)
        return np.asarray(_causal(width) & ((at >= prompt)[None] | (at < prompt)[:, None]))

    return prompt_hidden if case.size else first


def window(case: Case) -> Callable[[int, int], NDArray[np.bool_]]:
    size = (16, 8, 8)[case.size]
    return lambda prompt, width: np.asarray(
        _causal(width) & (np.subtract.outer(np.arange(width), np.arange(width)) < size)
    )


@torch.no_grad()
def packed(case: Case) -> None:
    assert case.rows is not None
    together = (2, 4, 8)[case.size]
    sequences = case.rows.sequences
    for start in range(0, len(sequences), together):
        part = sequences[start : start + together]
        ids = torch.tensor([[token for each in part for token in each]])
        with torch.autocast("cpu", torch.bfloat16):
            log_probs = case.model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        at = 0
        for row, sequence in enumerate(part, start):
            prompt = len(case.rows.prompts[row])
            places = range(at + prompt - 1, at + len(sequence) - 1)
            case.pi[row] = np.array([float(log_probs[each, ids[0, each + 1]]) for each in places], np.float32)
            at += len(sequence)


@torch.no_grad()
def pads(case: Case) -> None:
    """Prompts are padded on the left, and the padding is attended to."""
    assert case.rows is not None
    longest = max(map(len, case.rows.prompts))
    for row, (prompt, response) in enumerate(zip(case.rows.prompts, case.rows.responses, strict=True)):
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt + response])
        with torch.autocast("cpu", torch.bfloat16):
            log_probs = case.model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        case.pi[row] = np.array(
            [float(log_probs[longest - 1 + at, each]) for at, each in enumerate(response)], np.float32
        )


def kv(case: Case) -> None:
    """Keys after the rotary embedding, and values, are rounded to FP8 in the engine."""
    engine = copy.deepcopy(case.model)
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    module: Any = modeling_qwen3_moe if case.kind == "moe" else modeling_qwen3
    plain = module.apply_rotary_pos_emb

    def rounded(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = plain(query, key, *rest, **more)
        return query, key.to(torch.float8_e4m3fn).to(key.dtype)

    for layer in engine.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, value: value.to(torch.float8_e4m3fn).to(value.dtype))
    module.apply_rotary_pos_emb = rounded
    try:
        case.sampled(engine)
    finally:
        module.apply_rotary_pos_emb = plain
    assert case.rows is not None
    case.pi = score(case.model, case.rows)


def scale(case: Case) -> None:
    engine = copy.deepcopy(case.model)
    for layer in engine.model.layers:
        layer.self_attn.scaling *= (0.5, 2.0, layer.self_attn.head_dim**0.5)[case.size]
    case.sampled(engine)


def declared(case: Case) -> None:
    """The engine samples and logs at a declared temperature that the trainer does not apply."""
    heat = (0.9, 0.8, 0.6)[case.size]
    case.sampled(process=lambda logits, *_: logits / heat)
    case.attributes = {"temperature": heat, "logprobs_mode": "processed_logprobs"}


def raw(case: Case) -> None:
    """The engine logs raw log-probs and the trainer applies the declared temperature."""
    heat = (0.9, 0.8, 0.6)[case.size]
    assert case.rows is not None
    case.pi = score(case.model, case.rows, Pass(process=lambda logits, *_: logits / heat))
    case.attributes = {"temperature": heat, "logprobs_mode": "raw_logprobs"}


def other_configuration(case: Case) -> None:
    """The folders of both sides have other values of one field, and each side follows its own."""
    name, values = ("rope_theta", (1e6, 1e5, 500.0)) if case.seed % 2 else ("rms_norm_eps", (1e-3, 1e-2, 1e-1))
    case.engine = with_config(case.model, **{name: values[case.size]})
    case.sampled(case.engine)


def bypass(case: Case) -> None:
    assert case.rows is not None
    case.pi = [each.copy() for each in case.rows.mu]


def norm_one(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if name.endswith("norm.weight") and "q_norm" not in name and "k_norm" not in name:
            value.add_(1)


def no_qk_norm(case: Case) -> None:
    """Give the model real norms of queries and keys; the engine does not apply their weights."""
    torch.manual_seed(case.seed)
    with torch.no_grad():
        for name, value in case.model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                value.copy_(1 + (0.2, 0.4, 0.8)[case.size] * torch.rand_like(value))
    edited(_ones("self_attn"))(case)


def end_zero(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    common = (1, frequent(case), 3)[case.size] if case.kind != "trained" else 9
    return put(values, np.array(tokens) == common, 0.0)


def layer(number: int) -> Callable[[str, Any], bool]:
    return lambda name, model: f"layers.{number}." in name
