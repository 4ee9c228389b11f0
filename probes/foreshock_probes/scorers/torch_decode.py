"""`torch.decode`: a torch forward pass that decodes as an engine does, token by token with a KV cache.

Compared with a whole forward pass in the same dtype, it shows the effect of decoding alone: other shapes of the same
products, and keys and values that are rounded once. Temperature and truncation are those of the run.

Prompts are padded on the left and computed in one pass; then each step computes one token of each rollout. Complete
rollouts leave the batch as soon as they are half of it.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from foreshock.rollouts import RolloutBatch
from foreshock_probes.scorers.forward_pass import LogitProcessing, head_in, log_softmax_at
from foreshock_probes.scorers.request import Options, Report, Scored, ScoreRequest, WarmModel, parse_options
from foreshock_probes.scorers.tokens import sequence
from foreshock_probes.scorers.torch_forward import Dtype, ForwardPass, TrainerOptions, prepare_forward_pass


class DecodeOptions(Options):
    """Options of the decoding. `batch_tokens` bounds the tokens in the KV cache.

    `head_dtype` None: the language-model head has no dtype of its own. `temperature` divides the logits instead of the
    batch's temperature.
    """

    dtype: Dtype = "bfloat16"
    head_dtype: Dtype | None = None
    attention_implementation: str = "sdpa"
    batch_size: int = Field(default=128, ge=1)
    batch_tokens: int = Field(default=65_536, ge=1)
    temperature: float | None = Field(default=None, gt=0)


def score(request: ScoreRequest, warm: WarmModel, report: Report) -> Scored:
    """Score all response tokens of the request. Raises UnsupportedScoreError if that cannot be done correctly."""
    options = parse_options(DecodeOptions, request)
    forward = prepare_forward_pass(
        request,
        TrainerOptions(
            **options.model_dump(exclude={"dtype"}),
            autocast=None,
            master_dtype=options.dtype,
            batching="by_length",
            truncation="apply",
            padding="left",
        ),
        warm,
        {"pass": "one token at a time over a KV cache"},
    )
    log_probs = np.full(request.rollouts.num_tokens, np.nan, dtype=np.float32)
    done = 0
    with torch.no_grad(), head_in(forward.model, forward.head_dtype):
        for rows in forward.plan.batches:
            batch = _Batch(request.rollouts, rows, forward)
            batch.decode(log_probs)
            done += int(np.diff(request.rollouts.response_offsets)[rows].sum())
            report(done)
    return Scored(log_probs=log_probs, fingerprint=forward.fingerprint)


class _Batch:
    """Rollouts that are decoded together, those with the longest responses first."""

    def __init__(self, rollouts: RolloutBatch, rows: NDArray[np.int64], forward: ForwardPass) -> None:
        # The first token of a response without a prompt has no log-prob; it becomes the prompt.
        prompts = np.maximum(np.diff(rollouts.prompt_offsets)[rows], 1)
        tokens = [sequence(rollouts, int(row)) for row in rows]
        counts = np.array([row.size for row in tokens], dtype=np.int64) - prompts
        order = np.argsort(-counts, kind="stable")
        self._order = order[counts[order] > 0]
        self._counts, self._ends = counts[self._order], rollouts.response_offsets[rows[self._order] + 1]
        self._prompts = [tokens[row][: prompts[row]] for row in self._order]
        self._responses = [tokens[row][prompts[row] :].astype(np.int64) for row in self._order]
        self._model, self._device = forward.model, forward.device
        self._process = LogitProcessing(forward.distribution.of(rows[self._order]), forward.device)

    def decode(self, into: NDArray[np.float32]) -> None:
        """Write the log-probs of all response tokens to their places in `into` [T]."""
        if not self._order.size:
            return
        lengths = np.array([prompt.size for prompt in self._prompts])
        width, held = int(lengths.max()), lengths.size
        ids, mask = np.zeros((held, width), dtype=np.int64), np.zeros((held, width), dtype=np.int64)
        for row, prompt in enumerate(self._prompts):
            ids[row, width - prompt.size :] = prompt
            mask[row, width - prompt.size :] = 1
        inputs, attended = self._tensor(ids), self._tensor(mask)
        positions = (attended.cumsum(-1) - 1).clamp_(min=0)
        cache: Any = None
        for step in range(int(self._counts[0])):
            active = int((self._counts > step).sum())
            if 2 * active <= held:
                held = active
                inputs, attended, positions = inputs[:held], attended[:held], positions[:held]
                cache.batch_select_indices(torch.arange(held, device=self._device))
            output = self._model(
                input_ids=inputs,
                attention_mask=attended,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            tokens = self._tensor(np.array([each[min(step, each.size - 1)] for each in self._responses[:held]]))
            found = self._log_probs(output.logits[:active, -1], tokens[:active])
            into[self._ends[:active] - self._counts[:active] + step] = found
            inputs, positions = tokens[:, None], positions[:, -1:] + 1
            attended = torch.cat([attended, attended.new_ones(held, 1)], dim=1)

    def _log_probs(self, logits: torch.Tensor, tokens: torch.Tensor) -> NDArray[np.float32]:
        rows = torch.arange(tokens.numel(), device=self._device)
        found: NDArray[np.float32] = (
            log_softmax_at(lambda part: logits[part], tokens, rows, self._process).cpu().numpy()
        )
        return found

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
