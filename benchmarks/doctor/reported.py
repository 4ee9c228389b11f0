"""Injections from public reports and engines' options that no row of the catalogue describes.

They were written after the catalogue was committed. A report is named as repository#number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.doctor.case import Case
from benchmarks.doctor.lab import Pass, Rows, score, updated


def repeated_pairs(case: Case, logits: torch.Tensor, ids: torch.Tensor, *_: object) -> torch.Tensor:
    """No pair of ids is sampled twice (no_repeat_ngram_size; sglang#26685)."""
    for row, sequence in enumerate(ids.tolist()):
        after = [second for first, second in pairwise(sequence) if first == sequence[-1]]
        logits[row, after] = -torch.inf
    return logits


def typical(case: Case, logits: torch.Tensor, *_: object) -> torch.Tensor:
    """Typical sampling: the ids whose surprisal is nearest to the entropy, up to 0.8 of the mass (typical_p)."""
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
    order = (-log_probs - entropy).abs().argsort(-1)
    ordered = log_probs.exp().gather(-1, order)
    left_out = (ordered.cumsum(-1) - ordered >= 0.8).scatter(-1, order, ordered.cumsum(-1) - ordered >= 0.8)
    return logits.masked_fill(left_out, -torch.inf)


def near_the_largest(case: Case, logits: torch.Tensor, *_: object) -> torch.Tensor:
    """Top-nσ: the ids within 1.5 standard deviations of the largest logit."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) - 1.5 * logits.std(-1, keepdim=True), -torch.inf)


def top_excluded(case: Case, logits: torch.Tensor, *_: object) -> torch.Tensor:
    """XTC: of the ids above a probability of 0.1 only the least likely one stays, if there are several."""
    likely = logits.softmax(-1) > 0.1
    least = logits.masked_fill(~likely, torch.inf).argmin(-1, keepdim=True)
    return logits.masked_fill(likely.scatter(-1, least, value=False) & (likely.sum(-1, keepdim=True) > 1), -torch.inf)


def guided(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    """Guidance: 1.5 times the logits with the prompt − 0.5 times those without it."""
    without: torch.Tensor = case.model(ids[:, int(given[0]) - 1 :]).logits[:, -1].float()
    return 1.5 * logits - 0.5 * without


def end_grows(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    """The end becomes likelier with each token (exponential_decay_length_penalty)."""
    logits[:, 1] += logits[:, 1].abs() * (1.15**step - 1)
    return logits


def grammar(case: Case, logits: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, step: int) -> torch.Tensor:
    """A grammar allows every second id at every second token (structured output)."""
    if step % 2:
        logits[:, ::2] = -torch.inf
    return logits


def dynamic_temperature(case: Case, logits: torch.Tensor, *_: object) -> torch.Tensor:
    """The temperature follows the entropy, from 0.6 to 1.4."""
    log_probs = logits.log_softmax(-1)
    share = -(log_probs.exp() * log_probs).sum(-1, keepdim=True) / np.log(logits.shape[-1])
    heated: torch.Tensor = logits / (0.6 + 0.8 * share)
    return heated


def temperature_of_prompts(case: Case, logits: torch.Tensor, ids: torch.Tensor, *_: object) -> torch.Tensor:
    """Prompts have temperatures of their own, from 0.5 to 1.5."""
    return logits / (0.5 + (ids[:, :1] % 11) / 10)


def watermark(case: Case, logits: torch.Tensor, ids: torch.Tensor, *_: object) -> torch.Tensor:
    """Half of the ids, chosen by the id before, are likelier by 2 (WatermarkingConfig)."""
    green = (torch.arange(logits.shape[-1])[None] * 31 + ids[:, -1:] * 17) % 64 < 32
    return logits + 2.0 * green


def drafted(case: Case) -> None:
    """Accepted tokens have the log-probs of the draft model."""
    draft = score(updated(case.model, case.seed + 7, 0.3), case.rows, Pass("bfloat16"))
    random = np.random.default_rng(case.seed)
    for row, values in enumerate(draft):
        accepted = random.random(len(values)) < 0.6
        case.rows.mu[row] = np.where(accepted, values, case.rows.mu[row])


@torch.no_grad()
def padded_vocabulary(case: Case) -> None:
    """The trainer's softmax includes 128 padded ids with a logit of 0 (mirage#751, unsloth#10616)."""
    for row, (prompt, response) in enumerate(zip(case.rows.prompts, case.rows.responses, strict=True)):
        logits = case.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        wide = torch.cat([logits, torch.zeros(len(logits), 128)], 1).log_softmax(-1)
        case.pi[row] = wide.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


@contextmanager
def _attention(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace what attention makes of its scores; `change` gets the scores [n, heads, queries, keys]."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **named: Any) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(-1, -2)).float() * (named.get("scale") or query.shape[-1] ** -0.5)
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(ahead, -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
        found: torch.Tensor = change(scores).to(value.dtype) @ value
        return found

    torch.nn.functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain


def sink(case: Case) -> None:
    """Each head has a sink in the denominator of its softmax that the trainer drops (vllm#52156)."""
    with _attention(lambda scores: torch.cat([scores, torch.ones_like(scores[..., :1])], -1).softmax(-1)[..., :-1]):
        case.sampled()
    case.rescored(Pass())


def top_keys(case: Case) -> None:
    """Each query attends to its four best keys only (sparse attention)."""
    with _attention(
        lambda scores: (
            scores.masked_fill(scores < scores.topk(min(4, scores.shape[-1])).values[..., -1:], -torch.inf)
            .nan_to_num(neginf=-1e9)
            .softmax(-1)
        )
    ):
        case.sampled()
    case.rescored(Pass())


def biases_doubled(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """Each of two ranks adds the bias (text-generation-inference#1036)."""
    for name, value in tensors.items():
        if name.endswith("_proj.bias"):
            value.mul_(2)


def four_bit_floats(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """Weights are FP4 with a scale for each 16 (NVFP4)."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    levels = torch.cat([-levels.flip(0), levels])
    for name, value in tensors.items():
        if value.dim() > 1 and "layers." in name and "norm" not in name:
            blocks = value.reshape(-1, 16)
            scale = blocks.abs().amax(-1, keepdim=True) / 6
            nearest = (blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)
            value.copy_((levels[nearest] * scale).reshape(value.shape))


def sparse(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """Of each four weights the two smallest are 0 (2:4 sparsity)."""
    for name, value in tensors.items():
        if value.dim() > 1 and "layers." in name:
            blocks = value.reshape(-1, 4)
            least = blocks.abs().argsort(-1)[:, :2]
            value.copy_(blocks.scatter(-1, least, 0.0).reshape(value.shape))


def layout_of_kernel(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """The rows of the down projections are in the order of another kernel (miles#862)."""
    for name, value in tensors.items():
        if "down_proj" in name:
            rows = torch.arange(value.shape[-2]).reshape(-1, 4).T.reshape(-1)
            value.copy_(value[..., rows, :])


def expert_never_chosen(case: Case, tensors: dict[str, torch.Tensor]) -> None:
    """The router never chooses the last expert (a rank of expert parallelism that is masked)."""
    for name, value in tensors.items():
        if name.endswith("mlp.gate.weight"):
            value[-1] = -value[:-1].mean(0)


def router_noise(case: Case) -> None:
    """The router's logits have noise (router_jitter_noise), other ones in each pass."""
    engine = copy.deepcopy(case.model)
    for layer in engine.model.layers:
        layer.mlp.gate.weight.data.add_(0.5 * torch.randn_like(layer.mlp.gate.weight))
        layer.mlp.gate.register_forward_pre_hook(lambda _, inputs: (inputs[0] * (1 + 0.3 * torch.randn(())),))
    case.sampled(engine)


def seen_by(rule: Callable[[NDArray[np.int64], NDArray[np.int64], int], NDArray[np.bool_]]) -> Callable[[Case], Any]:
    """Return the mask of a pass: `rule` gets the places of queries and keys, and the length of the prompt."""

    def of_case(case: Case) -> Callable[[int, int], NDArray[np.bool_]]:
        def mask(prompt: int, width: int) -> NDArray[np.bool_]:
            query, key = np.mgrid[:width, :width]
            return np.asarray(rule(query, key, prompt))

        return mask

    return of_case


def first_and_last(query: NDArray[np.int64], key: NDArray[np.int64], prompt: int) -> NDArray[np.bool_]:
    """The first 2 and the last 5 tokens are kept (StreamingLLM)."""
    return np.asarray((key <= query) & ((key < 2) | (query - key < 5)))


def prompt_both_ways(query: NDArray[np.int64], key: NDArray[np.int64], prompt: int) -> NDArray[np.bool_]:
    """Tokens of the prompt attend to all of it (a prefix model)."""
    return np.asarray((key <= query) | ((key < prompt) & (query < prompt)))


def halves(query: NDArray[np.int64], key: NDArray[np.int64], prompt: int) -> NDArray[np.bool_]:
    """Tokens from the twelfth on see none before it: keys do not go round the ring (sglang#33353)."""
    return np.asarray((key <= query) & ((key >= 12) | (query < 12)))


def retokenised(case: Case) -> None:
    """The trainer's third id of each response is another one: text was tokenized again (sglang#26555)."""
    other = copy.deepcopy(case.rows)
    other.responses = [[*ids[:2], 2 + (ids[2] + 5) % 60, *ids[3:]] if len(ids) > 3 else ids for ids in other.responses]
    case.pi = [
        np.concatenate([mine[:2], theirs[2:]]) if len(mine) > 3 else mine
        for mine, theirs in zip(case.pi, score(case.model, other), strict=True)
    ]


def grid(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    """Log-probs are kept in five bits, from the smallest to 0."""
    step = np.float32(max(float(-values.min()), 1e-3) / 31)
    return np.asarray(np.round(values / step) * step, np.float32)


def stale_buffer(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    """Each second token has the value of the one before: a chunk was read before it was written."""
    values[1::2] = values[: len(values) - len(values) % 2 : 2]
    return values


def of_others(case: Case, row: int, values: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float32]:
    """Every seventh token has the value of another rollout."""
    other = case.rows.mu[(row + 3) % len(case.rows.mu)]
    values[::7] = other[np.arange(len(values))[::7] % len(other)]
    return values


def entropies(case: Case) -> None:
    """The entropies of the distributions, negated, are logged as log-probs."""
    _with_logits(case, lambda log_probs, ids: (log_probs.exp() * log_probs).sum(-1))


def smoothed_labels(case: Case) -> None:
    """Log-probs are those of a loss with smoothed labels."""
    _with_logits(case, lambda log_probs, ids: 0.9 * log_probs.gather(1, ids)[:, 0] + 0.1 * log_probs.mean(-1))


@torch.no_grad()
def _with_logits(case: Case, value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    rows: Rows = case.rows
    for row, (prompt, response) in enumerate(zip(rows.prompts, rows.responses, strict=True)):
        log_probs = (
            case.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        )
        case.pi[row] = value(log_probs, torch.tensor(response)[:, None]).numpy()
