"""Tiny models, an engine that decodes with a KV cache, and a trainer that scores: real faults are injected into them.

No code is shared with the doctor's own experimenter: a fault that both compute with the same code would prove nothing.
The engine is bfloat16 with a KV cache, the trainer an autocast pass over rows padded on the right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.rollouts import BatchAttributes, RolloutBatch

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED = REPOSITORY / "examples" / "tiny_rl" / "recorded" / "checkpoints"
KINDS = ("random", "tied", "moe", "trained", "biases", "gemma")
PROMPTS, RESPONSES, LONGEST = 8, 5, 20

Process = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""A function of logits [n, V], prompt and response ids so far [n, t], number of prompt tokens [n], response step."""


def new_model(kind: str, seed: int, **fields: Any) -> Any:
    """Return a float32 model; `trained` is the newest recorded checkpoint of the tiny run.

    `biases` is a Qwen2 with biases of queries, keys and values, `gemma` a Gemma2 with soft caps, windows of 8 tokens in
    every second layer, scaled embeddings and norms that add 1.
    """
    import transformers as hf

    if kind == "trained":
        return hf.AutoModelForCausalLM.from_pretrained(RECORDED / "step_0160", dtype=torch.float32).eval()
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind == "tied",
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    } | fields
    if kind == "moe":
        more = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**(shape | more))).eval()
    if kind == "biases":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**shape))
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith("_proj.bias"):
                    value.normal_(0, 0.5)
        return model.eval()
    if kind == "gemma":
        of_gemma: dict[str, Any] = {
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "initializer_range": 0.15,
        }
        model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**(shape | of_gemma), attn_implementation="eager"))
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "norm" in name:
                    value.normal_(0, 0.2)
        return model.eval()
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**shape)).eval()


def updated(model: Any, seed: int, size: float) -> Any:
    """Return the model with every matrix moved by `size` times its own spread, in a random direction."""
    torch.manual_seed(seed)
    found = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * size)
    return found


def with_config(model: Any, **fields: Any) -> Any:
    """Return the model with other fields of its configuration, and the same weights."""
    config = copy.deepcopy(model.config)
    for name, value in fields.items():
        if name == "rope_theta":
            config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
        elif name == "rope_factor":
            config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": value}
        elif name == "rope_parameters":
            config.rope_parameters = {**config.rope_parameters, **value}
        else:
            setattr(config, name, value)
    found = type(model)._from_config(config, attn_implementation=config._attn_implementation)
    state = model.state_dict()
    if found.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)  # tied now, so it would overwrite the embeddings
    found.load_state_dict(state, strict=False)
    found.tie_weights()
    return found.eval()


@dataclass
class Rows:
    """Rollouts: prompts, responses, and the log-probs that the engine logged."""

    prompts: list[list[int]]
    responses: list[list[int]]
    mu: list[NDArray[np.float32]]
    groups: list[int]

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and response of each row, concatenated."""
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]


def prompts_of(model: Any, seed: int, number: int = PROMPTS) -> list[list[int]]:
    """Return prompts of 5, 8 or 12 ids, none of which is the padding or the end."""
    random = np.random.default_rng(seed)
    return [random.integers(2, model.config.vocab_size, (5, 8, 12)[each % 3]).tolist() for each in range(number)]


@torch.no_grad()
def sample(
    model: Any,
    prompts: list[list[int]],
    seed: int,
    process: Process | None = None,
    dtype: torch.dtype = torch.bfloat16,
    responses: int = RESPONSES,
) -> Rows:
    """Decode with a KV cache; the logged log-probs are those of the distribution that `process` returns."""
    engine = copy.deepcopy(model).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    rows = Rows([], [], [], [])
    for length in sorted({len(prompt) for prompt in prompts}):
        groups = [group for group, prompt in enumerate(prompts) if len(prompt) == length for _ in range(responses)]
        ids = torch.tensor([prompts[group] for group in groups])
        given = torch.full((len(groups),), length)
        past, current, tokens, logged = None, ids, [], []
        for step in range(LONGEST):
            output = engine(current, past_key_values=past, use_cache=True)
            past, logits = output.past_key_values, output.logits[:, -1].float()
            if process is not None:
                logits = process(logits.clone(), ids, given, step)
            log_probs = logits.log_softmax(-1)
            chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
            tokens.append(chosen[:, 0])
            logged.append(log_probs.gather(1, chosen)[:, 0])
            ids, current = torch.cat([ids, chosen], 1), chosen
        drawn, values = torch.stack(tokens, 1), torch.stack(logged, 1)
        for row, group in enumerate(groups):
            ends = (drawn[row] == 1).nonzero()
            stop = int(ends[0]) + 1 if len(ends) else LONGEST
            rows.prompts.append(list(prompts[group]))
            rows.responses.append(drawn[row, :stop].tolist())
            rows.mu.append(values[row, :stop].numpy())
            rows.groups.append(group)
    return rows


@dataclass
class Pass:
    """The differences of a scoring pass: precision, positions, mask, processing of its logits."""

    precision: str = "autocast"
    positions: Callable[[int, int], NDArray[np.int64]] | None = None
    mask: Callable[[int, int], NDArray[np.bool_]] | None = None
    process: Process | None = None
    size: int = 16
    train: bool = False


@torch.no_grad()
def score(model: Any, rows: Rows, how: Pass | None = None) -> list[NDArray[np.float32]]:
    """Return the log-probs of each response in one pass over rows padded on the right."""
    how = how or Pass()
    scorer = copy.deepcopy(model)
    if how.precision in ("bfloat16", "float16"):
        scorer = scorer.to(torch.bfloat16 if how.precision == "bfloat16" else torch.float16)
    scorer.train(how.train)
    found: list[NDArray[np.float32]] = []
    sequences = rows.sequences
    for start in range(0, len(sequences), how.size):
        part = sequences[start : start + how.size]
        width = max(map(len, part))
        ids = torch.zeros(len(part), width, dtype=torch.long)
        seen = torch.zeros_like(ids)
        inputs: dict[str, Any] = {}
        for row, sequence in enumerate(part):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            seen[row, : len(sequence)] = 1
        inputs["attention_mask"] = seen
        lengths = [len(prompt) for prompt in rows.prompts[start : start + how.size]]
        if how.positions is not None:
            inputs["position_ids"] = torch.from_numpy(np.stack([how.positions(each, width) for each in lengths]))
        if how.mask is not None:
            masks = np.stack([how.mask(each, width) for each in lengths])[:, None]
            mask = torch.from_numpy(masks & (seen.numpy()[:, None, None] > 0) | np.eye(width, dtype=bool))
            inputs["attention_mask"] = mask
            if size := getattr(scorer.config, "sliding_window", None):  # layers keep their own windows
                sliding = mask & torch.ones(width, width, dtype=torch.bool).triu(1 - size)
                inputs["attention_mask"] = {"full_attention": mask, "sliding_attention": sliding}
        with torch.autocast("cpu", torch.bfloat16, enabled=how.precision == "autocast"):
            logits = scorer(ids, use_cache=False, **inputs).logits.float()
        for row, (sequence, prompt) in enumerate(zip(part, lengths, strict=True)):
            own = logits[row, prompt - 1 : len(sequence) - 1]
            if how.process is not None:
                own = torch.stack(
                    [
                        how.process(
                            own[step][None].clone(), ids[row][None, : prompt + step], torch.tensor([prompt]), step
                        )[0]
                        for step in range(len(own))
                    ]
                )
            tokens = torch.tensor(sequence[prompt:])[:, None]
            found.append(own.log_softmax(-1).gather(1, tokens)[:, 0].numpy().copy())
    return found


def batch_of(
    rows: Rows, pi: list[NDArray[np.float32]], attributes: BatchAttributes | None = None, **columns: Any
) -> RolloutBatch:
    """Return the logged batch."""
    return RolloutBatch.from_lists(
        [f"r{row}" for row in range(len(rows.prompts))],
        rows.prompts,
        rows.responses,
        rollout_log_probs=[np.asarray(each, np.float32) for each in rows.mu],
        trainer_log_probs=[np.asarray(each, np.float32) for each in pi],
        group_ids=[f"g{group}" for group in rows.groups],
        attributes=attributes or BatchAttributes(),
        check_values=False,
        **columns,
    )


def save(model: Any, folder: Path) -> Path:
    """Save a model as a folder of weights."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
