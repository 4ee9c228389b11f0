"""Injections in three sizes: each changes the engine's computation, the trainer's computation or the logged values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.doctor.case import Case
from benchmarks.doctor.lab import Pass, prompts_of, sample, score, updated, with_config


def changed_data(
    change: Callable[[Case, int, NDArray[np.float32], list[int]], NDArray[np.float32]], side: str
) -> Callable[[Case], None]:
    def inject(case: Case) -> None:
        values = case.logged(side)
        for row, tokens in enumerate(case.rows.responses):
            values[row] = change(case, row, values[row].copy(), tokens)

    return inject


def shift(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    concerned = (True, row % 2 == 0, row % 5 == 0)[case.size]
    return np.concatenate([values[1:], values[:1]]) if concerned else values


def last_zero(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    if row % 2:
        values[-1 - case.size :] = 0.0
    return values


def sentinels(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    values[:: (9, 5, 2)[case.size]] = -9999.0
    return values


def clamped(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    return np.asarray(np.maximum(values, -0.2 if case.kind == "trained" else (-3.0, -2.0, -1.0)[case.size]))


def other_base(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    return np.asarray(values / np.log(2 if case.size == 1 else 10), np.float32)


def cumulative(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    return np.array([values[: at + 1].sum() for at in range(len(values))], np.float32)


def by_length(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    return (values / len(tokens)).astype(np.float32)


def one_value(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    """Each token has the mean, or the sum, of its rollout."""
    return np.full_like(values, values.sum() / (1 if case.size == 1 else len(values)))


def rounded(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Case], None]:
    """Return a float32 trainer that keeps its log-probs with fewer digits."""

    def inject(case: Case) -> None:
        values = score(case.model, case.rows, Pass("float32"))
        case.pi = [change(torch.from_numpy(each)).float().numpy() for each in values]

    return inject


def end_zero(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    values[np.array(tokens) == (9 if case.kind == "trained" else (1, 5, 3)[case.size])] = 0.0
    return values


def permuted(case: Case) -> None:
    """The rollouts of each length are logged in another order."""
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
    return lambda case: case.sampled(process=partial(change, case))


def of_logits(change: Callable[[torch.Tensor, Any], torch.Tensor], *sizes: float) -> Callable[[Case], None]:
    """Return an engine that processes its logits by a function of them and a number for each size."""
    return processed(lambda case, logits, *_: change(logits, sizes[case.size]))


def top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = logits.sort(descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(before >= top_p, -torch.inf))


def top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)


def min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def together(*kinds: str, sizes: tuple[tuple[float, ...], ...]) -> Callable[[Case], None]:
    """Return an engine with several sampling parameters, in the order of vLLM: penalties, bias, temperature, min-p,
    top-k, top-p."""

    def change(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
        value = dict(zip(kinds, sizes[case.size], strict=True))
        seen = _seen(ids, logits.shape[-1])
        counts = _seen(ids[:, int(given[0]) :], logits.shape[-1])
        if factor := value.get("repetition penalty"):
            logits = torch.where(seen > 0, torch.where(logits > 0, logits / factor, logits * factor), logits)
        logits = (
            logits - value.get("frequency penalty", 0.0) * counts - value.get("presence penalty", 0.0) * (counts > 0)
        )
        logits = biased(logits, value.get("id 5", 0.0))
        if step < value.get("at the first", 0):
            logits = biased(logits, -torch.inf, token=1)
        logits = logits / value.get("temperature", 1.0)
        if "min p" in value:
            logits = min_p(logits, value["min p"])
        if "top k" in value:
            logits = top_k(logits, int(value["top k"]))
        return top_p(logits, value["top p"]) if "top p" in value else logits

    return processed(change)


def _seen(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.zeros(ids.shape[0], vocabulary).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float32))


def repetition(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    factor = (1.1, 1.25, 1.5)[case.size]
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    return torch.where(_seen(ids, logits.shape[-1]) > 0, penalised, logits)


def repetition_of_response(
    case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int
) -> torch.Tensor:
    return repetition(case, logits, ids[:, int(given[0]) :], given, step)


def presence(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    response = ids[:, int(given[0]) :]
    return logits - (0.5, 1.0, 1.5)[case.size] * (_seen(response, logits.shape[-1]) > 0)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(logits / cap)


def biased(logits: torch.Tensor, value: float, token: int = 5) -> torch.Tensor:
    logits[:, token] += value
    return logits


def banned(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    return biased(logits, -torch.inf, token=9 if case.kind == "trained" else 5)


def no_end(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    return biased(logits, -torch.inf, token=1) if step < (4, 8, 12)[case.size] else logits


def ends(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    """Exclude several ends at the first tokens."""
    if step < (6, 10, 14)[case.size]:
        logits[:, [1, 3, 6]] = -torch.inf
    return logits


def bias_of_all(case: Case, logits: torch.Tensor, *_: object) -> torch.Tensor:
    """The engine adds a bias to each id, as a head with a bias does."""
    generator = torch.Generator().manual_seed(case.seed)
    return logits + (0.3, 0.7, 1.1)[case.size] * torch.randn(logits.shape[-1], generator=generator)


def soft_cap_product(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return logits * torch.tanh(logits / cap)


def truncated_and_raw(case: Case) -> None:
    """The engine samples with a truncation and logs the log-probs from before it."""
    change = (partial(top_k, top_k=6), partial(top_p, top_p=0.8), partial(min_p, min_p=0.15))[case.size]
    case.sampled(process=lambda logits, *_: change(logits))
    case.rescored(Pass("bfloat16"), side="rollout")


def prompt(edit: Callable[[Case, list[int]], list[int]], common: int = 0) -> Callable[[Case], None]:
    """Return an engine that samples with edited prompts; the logged ones start with `common` equal ids."""

    def inject(case: Case) -> None:
        prompts = prompts_of(case.model, case.seed, case.prompts)
        logged = [[*prompts[0][:common], *each] for each in prompts]
        case.rows = sample(case.model, [edit(case, each) for each in logged], case.seed, responses=case.responses)
        case.rows.prompts = [list(logged[group]) for group in case.rows.groups]
        case.pi = score(case.model, case.rows)

    return inject


def bos_twice(case: Case, prompt: list[int]) -> list[int]:
    case.model.config.bos_token_id = prompt[0]
    return [prompt[0], *prompt]


def another_bos(case: Case, prompt: list[int]) -> list[int]:
    """The logged prompts have no BOS, the engine's have the one of the configuration."""
    case.model.config.bos_token_id = (2, 7, 4)[case.size]
    return [case.model.config.bos_token_id, *prompt]


def first_cut(case: Case, prompt: list[int]) -> list[int]:
    return prompt[(1, 2, 4)[case.size] :]


def last_cut(case: Case, prompt: list[int]) -> list[int]:
    return prompt[: -(1, 2, 3)[case.size]]


def prefix_cut(case: Case, prompt: list[int]) -> list[int]:
    """The system prompt, equal in all prompts, is missing."""
    return prompt[5:]


def truncated(case: Case, prompt: list[int]) -> list[int]:
    """The prompt is cut on the left to a largest length."""
    return prompt[-(8, 6, 4)[case.size] :]


def _older(case: Case, size: float) -> Any:
    """Move the known older weights this far from the announced ones, and return them."""
    case.old = updated(case.model, case.seed + 1, size)
    return case.old


def stale(case: Case) -> None:
    case.sampled(_older(case, (0.02, 0.05, 0.2)[case.size]))


def mixture(case: Case) -> None:
    """Some ranks of the engine hold older weights; they sampled every second, third or fourth rollout."""
    held = score(_older(case, 0.06), case.rows, Pass("bfloat16"))
    case.rows.mu = [held[row] if row % (2 + case.size) == 0 else each for row, each in enumerate(case.rows.mu)]


def in_flight(case: Case) -> None:
    """New weights arrive in the middle of each response."""
    held = score(_older(case, 0.06), case.rows, Pass("bfloat16"))
    part = (0.3, 0.5, 0.7)[case.size]
    for row, values in enumerate(case.rows.mu):
        first = int(part * len(values))
        case.rows.mu[row] = np.concatenate([held[row][:first], values[first:]])


@torch.no_grad()
def prompt_cache(case: Case) -> None:
    older = _older(case, (0.04, 0.08, 0.16)[case.size])
    old, new = (copy.deepcopy(each).to(torch.bfloat16) for each in (older, case.model))
    for row, (prompt, response) in enumerate(zip(case.rows.prompts, case.rows.responses, strict=True)):
        past = old(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
        values = []
        for token, given in zip(response, [prompt[-1], *response[:-1]], strict=True):
            output = new(torch.tensor([[given]]), past_key_values=past, use_cache=True)
            values.append(float(output.logits[0, -1].float().log_softmax(-1)[token]))
            past = output.past_key_values
        case.rows.mu[row] = np.array(values, np.float32)


def part(of_name: str) -> Callable[[Case], None]:
    """Return an engine that holds older weights in the tensors whose name has this part."""

    def inject(case: Case) -> None:
        older = _older(case, (0.05, 0.1, 0.2)[case.size]).state_dict()
        engine = copy.deepcopy(case.model)
        engine.load_state_dict({name: value for name, value in older.items() if of_name in name}, strict=False)
        case.sampled(engine)

    return inject


def scaled_update(*fractions: float) -> Callable[[Case], None]:
    """Return an engine that holds a fraction of the update since older weights, a fraction for each size."""

    @torch.no_grad()
    def inject(case: Case) -> None:
        engine = copy.deepcopy(case.model)
        older = _older(case, (0.03, 0.06, 0.12)[case.size])
        for mine, before in zip(engine.parameters(), older.parameters(), strict=True):
            mine.copy_(before + fractions[case.size] * (mine - before))
        case.sampled(engine)

    return inject


@torch.no_grad()
def partly_quantised(case: Case) -> None:
    """Quantise only the MLPs, or only their gate and up projections, or only attention, to FP8 per row."""
    parts = (("mlp",), ("gate_proj", "up_proj", "gate_up_proj"), ("self_attn",))[case.size]
    trainer = copy.deepcopy(case.model)
    for name, value in trainer.named_parameters():
        if value.dim() > 1 and any(part in name for part in parts):
            scale = value.abs().amax(-1, keepdim=True) / 448
            value.copy_((value / scale).to(torch.float8_e4m3fn).float() * scale)
    case.rescored(Pass(), trainer)


@torch.no_grad()
def quantised(case: Case) -> None:
    """Quantise layers to FP8 or, at larger sizes, to four bits, with a scale for each row."""
    engine = copy.deepcopy(case.model)
    for name, value in engine.named_parameters():
        if value.dim() > 1 and "layers." in name:
            scale = value.abs().amax(-1, keepdim=True) / (7 if case.size else 448)
            scaled = value / scale
            value.copy_((scaled.round() if case.size else scaled.to(torch.float8_e4m3fn).float()) * scale)
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


def skipped_layer(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """The second layer adds nothing (an early exit)."""
    for name, value in tensors.items():
        if "layers.1." in name and ("o_proj" in name or "down_proj" in name):
            value.zero_()


def scored(side: str, **how: Callable[[Case], Any]) -> Callable[[Case], None]:
    """Return a side that scores by a pass whose fields are functions of the case."""
    return lambda case: case.rescored(Pass(**{name: value(case) for name, value in how.items()}), side=side)


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
def _autocast_log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        log_probs: torch.Tensor = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
    return log_probs


def packed(case: Case) -> None:
    together = (2, 4, 8)[case.size]
    sequences = case.rows.sequences
    for start in range(0, len(sequences), together):
        part = sequences[start : start + together]
        ids = torch.tensor([[token for each in part for token in each]])
        log_probs = _autocast_log_probs(case.model, ids)
        at = 0
        for row, sequence in enumerate(part, start):
            places = range(at + len(case.rows.prompts[row]) - 1, at + len(sequence) - 1)
            case.pi[row] = np.array([float(log_probs[each, ids[0, each + 1]]) for each in places], np.float32)
            at += len(sequence)


def pads(case: Case) -> None:
    """Prompts are padded on the left, and attention includes the padding."""
    longest = max(map(len, case.rows.prompts))
    for row, (prompt, response) in enumerate(zip(case.rows.prompts, case.rows.responses, strict=True)):
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt + response])
        log_probs = _autocast_log_probs(case.model, ids)[longest - 1 :]
        case.pi[row] = np.array([float(log_probs[at, each]) for at, each in enumerate(response)], np.float32)


def kv(case: Case) -> None:
    """Keys after the rotary embedding, and values, are rounded to FP8 in the engine."""
    engine = copy.deepcopy(case.model)
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    module: Any = modeling_qwen3_moe if case.kind == "moe" else modeling_qwen3
    plain = module.apply_rotary_pos_emb

    def rounded(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = plain(query, key, *rest, **more)
        return query, key.to(narrow).to(key.dtype)

    narrow = torch.float8_e5m2 if case.size == 2 else torch.float8_e4m3fn
    for layer in engine.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, value: value.to(narrow).to(value.dtype))
    module.apply_rotary_pos_emb = rounded
    try:
        case.sampled(engine)
    finally:
        module.apply_rotary_pos_emb = plain
    case.rescored(Pass())


@torch.no_grad()
def likeliest(case: Case) -> None:
    """The engine logs the first of the log-probs that it returns, which is that of the likeliest token."""
    engine = copy.deepcopy(case.model).to(torch.bfloat16)
    for row, (prompt, response) in enumerate(zip(case.rows.prompts, case.rows.responses, strict=True)):
        logits = engine(torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        case.rows.mu[row] = logits.log_softmax(-1).amax(-1).numpy()


def gate_and_up(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if name.endswith("gate_up_proj"):
            half = value.shape[1] // 2
            value.copy_(torch.cat([value[:, half:], value[:, :half]], 1))
        elif name.endswith("gate_proj.weight"):
            kept, other = value.clone(), tensors[name.replace("gate", "up")]
            value.copy_(other)
            other.copy_(kept)


def no_biases(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if name.endswith("_proj.bias"):
            value.zero_()


def minus_one(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if name.endswith("norm.weight"):
            value.sub_(1)


def no_final_norm(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"].fill_(0.0 if case.kind == "gemma" else 1.0)


@torch.no_grad()
def other_final_norm(case: Case) -> None:
    """Give the model a real final norm; the engine does not load it."""
    torch.manual_seed(case.seed)
    norm = 1 + (0.3, 0.5, 0.8)[case.size] * torch.rand_like(case.model.model.norm.weight)
    for each in (case.model, case.old):
        each.model.norm.weight.copy_(norm)
    edited(no_final_norm)(case)


def embedding_scale(case: Case) -> None:
    """The engine scales its embeddings, or does not where the model does."""
    engine = copy.deepcopy(case.model)
    root = engine.config.hidden_size**0.5
    factor = 1 / root if case.kind == "gemma" else root
    engine.model.embed_tokens.register_forward_hook(lambda _, __, value: value * factor)
    case.sampled(engine)


def rotated_neighbours(case: Case) -> None:
    """The rotary embedding turns neighbours in place of the two halves of a head."""
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    module: Any = modeling_qwen3_moe if case.kind == "moe" else modeling_qwen3
    plain = module.apply_rotary_pos_emb

    def turned(value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = value.shape[-1] // 2
        cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
        first, second = value[..., ::2], value[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)

    module.apply_rotary_pos_emb = lambda query, key, cos, sin, *_, **__: (
        turned(query, cos, sin),
        turned(key, cos, sin),
    )
    try:
        case.sampled(copy.deepcopy(case.model))
    finally:
        module.apply_rotary_pos_emb = plain
    case.rescored(Pass())


@torch.no_grad()
def stale_rank(case: Case) -> None:
    """One of two or four tensor-parallel ranks missed the last update."""
    engine, ranks = copy.deepcopy(case.model), (2, 2, 4)[case.size]
    held = dict(_older(case, (0.06, 0.1, 0.1)[case.size]).named_parameters())
    for name, mine in engine.named_parameters():
        if "norm" in name or name.endswith("mlp.gate.weight") or (mine.dim() == 1 and "o_proj" in name):
            continue
        axis = mine.dim() - 1 if mine.dim() == 1 or "o_proj" in name or "down_proj" in name else mine.dim() - 2
        pieces = 2 * ranks if "gate_up" in name else ranks
        for at in (0, ranks) if pieces > ranks else (0,):
            size = mine.shape[axis] // pieces
            mine.narrow(axis, at * size, size).copy_(held[name].narrow(axis, at * size, size))
    case.sampled(engine)


@torch.no_grad()
def stale_expert(case: Case) -> None:
    """One expert of each layer missed the last update."""
    engine, older = copy.deepcopy(case.model), _older(case, (0.1, 0.15, 0.2)[case.size])
    for (name, mine), before in zip(engine.named_parameters(), older.parameters(), strict=True):
        if ".experts." in name:
            mine[1] = before[1]
    case.sampled(engine)


@torch.no_grad()
def queries_regrouped(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """The conversion exchanged the second and the third of four query heads, in one layer."""
    size = case.model.config.head_dim if hasattr(case.model.config, "head_dim") else 12
    for name, value in tensors.items():
        if "layers.1.self_attn.q_proj" in name:
            heads = value.view(4, size, -1)
            kept = heads[1].clone()
            heads[1] = heads[2]
            heads[2] = kept


@torch.no_grad()
def quantised_activations(case: Case) -> None:
    """Both operands of each linear layer are FP8, with a scale for each token and for each row or tensor of weights."""
    engine = copy.deepcopy(case.model)

    def rounded(value: torch.Tensor, by_row: bool = True) -> torch.Tensor:
        scale = (value.float().abs().amax(-1, keepdim=True) if by_row else value.float().abs().max()) / 448
        scale = scale.clamp(min=1e-9)
        return ((value.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(value.dtype)

    for name, module in engine.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers." in name:
            module.weight.copy_(rounded(module.weight, case.size > 0))
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    case.sampled(engine)


def scaled_as(kind: str) -> Callable[[Case], None]:
    """Return an engine that scales positions as Llama 3 does, or by YaRN."""
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0} if kind == "llama3" else {"factor": 4.0}
    scaling = {"rope_type": kind, "original_max_position_embeddings": 32 if kind == "llama3" else 64, **more}
    return lambda case: case.sampled(with_config(case.model, rope_parameters=scaling))


def unscaled(case: Case) -> None:
    """The configuration scales positions, and the engine does not."""
    plain = case.model
    case.model = with_config(plain, rope_factor=(2.0, 4.0, 8.0)[case.size])
    case.old = with_config(case.old, rope_factor=(2.0, 4.0, 8.0)[case.size])
    case.sampled(plain)


def without_windows(case: Case) -> None:
    case.sampled(with_config(case.model, layer_types=["full_attention"] * len(case.model.config.layer_types)))


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
    case.rescored(Pass(process=lambda logits, *_: logits / heat))
    case.attributes = {"temperature": heat, "logprobs_mode": "raw_logprobs"}


def other_configuration(case: Case) -> None:
    """The folders of both sides have other values of one field, and each side follows its own."""
    name, values = ("rope_theta", (1e6, 1e5, 500.0)) if case.seed % 2 else ("rms_norm_eps", (1e-3, 1e-2, 1e-1))
    case.engine = with_config(case.model, **{name: values[case.size]})
    case.sampled(case.engine)


def bypass(case: Case) -> None:
    case.pi = [each.copy() for each in case.rows.mu]


def norm_one(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    for name, value in tensors.items():
        if name.endswith("norm.weight") and "q_norm" not in name and "k_norm" not in name:
            value.add_(1)


@torch.no_grad()
def no_qk_norm(case: Case) -> None:
    """Give the model real norms of queries and keys; the engine does not apply their weights."""
    torch.manual_seed(case.seed)
    engine = copy.deepcopy(case.model)
    for (name, value), mine in zip(case.model.named_parameters(), engine.parameters(), strict=True):
        if "q_norm" in name or "k_norm" in name:
            value.copy_(1 + (0.2, 0.4, 0.8)[case.size] * torch.rand_like(value))
            mine.fill_(1.0)
    case.sampled(engine)
