"""A forward pass in torch: load a causal language model, pad rows, compute log-probs in bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from probes.scorers.request import UnsupportedScoreError
from probes.scorers.tokens import sequences

__all__ = ["PaddedBatch", "head_in", "load_model", "next_token_log_probs"]

BYTES_PER_LOGIT = 10  # 2 as computed, 4 as float32, 4 of log-softmax


def load_model(folder: Path, dtype: torch.dtype, attention_implementation: str, device: torch.device) -> Any:
    """Load the causal language model in `folder` in `dtype`, in evaluation mode.

    Raises UnsupportedScoreError if the model's code is not part of transformers, or if parameters are missing, which
    transformers would initialise randomly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention_implementation,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (ValueError, ImportError, OSError, KeyError, RuntimeError) as error:
        raise UnsupportedScoreError(f"transformers cannot load the checkpoint: {error}") from error
    lacking = sorted([*loaded["missing_keys"], *(str(key) for key in loaded["mismatched_keys"])])
    if lacking:
        raise UnsupportedScoreError(
            f"{len(lacking)} parameters of the model are missing in the checkpoint or have another shape: {lacking[0]}"
        )
    return model.eval().to(device)


class PaddedBatch:
    """Rows of a batch as tensors `ids` and `mask` [rows, time], padded on one side to the longest row."""

    def __init__(self, rollouts: RolloutBatch, rows: NDArray[np.int64], padding: str, device: torch.device) -> None:
        tokens = sequences(rollouts, rows)
        self.lengths = np.array([row.size for row in tokens], dtype=np.int64)
        width = int(self.lengths.max(initial=1))
        ids = np.zeros((rows.size, width), dtype=np.int64)
        mask = np.zeros_like(ids)
        self._starts = width - self.lengths if padding == "left" else np.zeros_like(self.lengths)
        for index, (start, row) in enumerate(zip(self._starts, tokens, strict=True)):
            ids[index, start : start + row.size] = row
            mask[index, start : start + row.size] = 1
        self.ids = torch.from_numpy(ids).to(device)
        self.mask = torch.from_numpy(mask).to(device)
        # Rows padded on the right have the positions 0, 1, …, the default of models.
        self.positions = (self.mask.cumsum(-1) - 1).clamp_(min=0) if padding == "left" else None
        self._prompts = np.diff(rollouts.prompt_offsets)[rows]
        self._targets = [slice(*rollouts.response_offsets[row : row + 2]) for row in rows.tolist()]
        self.num_response_tokens = int(sum(target.stop - target.start for target in self._targets))

    @property
    def needed(self) -> torch.Tensor:
        """True at the positions before a response token, shape [rows, time − 1]."""
        needed = np.zeros((self.lengths.size, self.ids.shape[1] - 1), dtype=np.bool_)
        for index, (start, prompt, length) in enumerate(zip(self._starts, self._prompts, self.lengths, strict=True)):
            needed[index, start + max(prompt - 1, 0) : start + length - 1] = True
        return torch.from_numpy(needed).to(self.ids.device)

    def write(self, log_probs: torch.Tensor, into: NDArray[np.float32]) -> None:
        """Copy the responses' log-probs of `log_probs` [rows, time − 1] to their places in `into` [T].

        The first token of a response without a prompt has no log-prob; its value in `into` is unchanged.
        """
        values = log_probs.float().cpu().numpy()
        for index, target in enumerate(self._targets):
            start, prompt = int(self._starts[index]), int(self._prompts[index])
            first = target.start + (1 if prompt == 0 else 0)
            begin = start + max(prompt - 1, 0)
            into[first : target.stop] = values[index, begin : begin + max(target.stop - first, 0)]


@contextlib.contextmanager
def head_in(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Compute the language-model head in `dtype`, without autocast, within the block; None: unchanged."""
    head = model.get_output_embeddings()
    if dtype is None:
        yield
        return
    weight, bias, plain = head.weight.to(dtype), getattr(head, "bias", None), head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.to(dtype), weight, None if bias is None else bias.to(dtype))

    head.forward = forward
    try:
        yield
    finally:
        head.forward = plain


def next_token_log_probs(
    model: Any, batch: PaddedBatch, divisor: NDArray[np.float64], autocast: torch.dtype | None, logits_bytes: int
) -> torch.Tensor:
    """Return the log-prob of each token given the previous ones, float32 [rows, time − 1], in nats.

    Only positions of `batch.needed` are defined. `divisor` [rows] divides the logits, which are cast to float32 before
    log-softmax, as in trainers. If all logits need more than `logits_bytes`, the head is applied in pieces.
    """
    rows, width = batch.ids.shape
    if width < 2:
        return torch.full((rows, 0), torch.nan)
    divisors = torch.from_numpy(divisor).to(batch.ids.device, torch.float32)
    inputs: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask, "use_cache": False}
    if batch.positions is not None:
        inputs["position_ids"] = batch.positions
    with _autocast(batch.ids.device, autocast):
        vocabulary = model.get_output_embeddings().weight.shape[0]
        if rows * width * vocabulary * BYTES_PER_LOGIT <= logits_bytes:
            logits = model(**inputs).logits[:, :-1]
            return _log_softmax_at(logits, batch.ids[:, 1:], divisors[:, None])
        _check_head_is_last(model, batch.ids[:1, :8])
        hidden = model.get_decoder()(**inputs).last_hidden_state[:, :-1]
        log_probs = torch.full((rows, width - 1), torch.nan, device=batch.ids.device)
        piece = max(1, logits_bytes // (vocabulary * BYTES_PER_LOGIT))
        row, position = batch.needed.nonzero(as_tuple=True)
        for start in range(0, row.numel(), piece):
            at = row[start : start + piece], position[start : start + piece]
            logits = model.get_output_embeddings()(hidden[at])
            log_probs[at] = _log_softmax_at(logits, batch.ids[:, 1:][at], divisors[at[0]])
        return log_probs


def _log_softmax_at(logits: torch.Tensor, tokens: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of `tokens` [...] under `logits` [..., V] divided by `divisors` [...]."""
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.float()
        if bool((divisors != 1).any()):
            logits = logits / divisors[..., None]
        return torch.log_softmax(logits, dim=-1).gather(-1, tokens[..., None])[..., 0]


def _check_head_is_last(model: Any, ids: torch.Tensor) -> None:
    """Raise UnsupportedScoreError if the model changes its logits after the head (soft caps, scales)."""
    whole = model(input_ids=ids, use_cache=False).logits
    alone = model.get_output_embeddings()(model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole, alone):
        raise UnsupportedScoreError(
            "the model changes its logits after the head, so they cannot be computed in pieces; raise the scorer's "
            "option logits_bytes or lower batch_size until the logits of a batch fit"
        )


def _autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()
