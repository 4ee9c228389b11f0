"""A forward pass in torch: load a model, pad rows, process logits, compute log-probs in bounded memory."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.rollouts import RolloutBatch
from foreshock_probes.adapters import with_adapter
from foreshock_probes.scorers.request import UnsupportedScoreError
from foreshock_probes.scorers.sampling import LoggedDistribution
from foreshock_probes.scorers.tokens import sequences


class LogitProcessing:
    """Processes float32 logits as `distribution` specifies for each row, in vLLM's order.

    The order is temperature, min-p, top-k, top-p. Top-k also keeps tokens that are as probable as its last one.
    """

    def __init__(self, distribution: LoggedDistribution, device: torch.device) -> None:
        self._temperature = torch.from_numpy(distribution.temperature).to(device, torch.float32)
        self._log_min_p = torch.from_numpy(distribution.min_p).to(device, torch.float32).log()
        self._top_k = torch.from_numpy(distribution.top_k).to(device)
        self._top_p = torch.from_numpy(distribution.top_p).to(device, torch.float32)
        self._scales = bool((distribution.temperature != 1).any())
        self._truncates = bool(distribution.truncated.any())

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the processed logits [n, V] of `rows` [n]; removed tokens have −∞."""
        if self._scales:
            logits = logits / self._temperature[rows, None]
        if not self._truncates:
            return logits
        largest = logits.amax(-1, keepdim=True)
        logits = logits.masked_fill(logits < largest + self._log_min_p[rows, None], -torch.inf)
        ascending, order = torch.sort(logits, dim=-1, stable=True)
        top_k = self._top_k[rows, None]
        vocabulary = logits.shape[-1]
        smallest = ascending.gather(-1, (vocabulary - top_k).clamp(0, vocabulary - 1))
        cut = (ascending < smallest) & (top_k > 0)
        ascending = ascending.masked_fill(cut, -torch.inf)
        below = ascending.softmax(-1).cumsum(-1)
        top_p = self._top_p[rows, None]
        outside = (below <= 1 - top_p) & (top_p < 1)
        outside[:, -1] = False
        return logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut | outside), -torch.inf)


# Bytes of float32 logits at a time: on a CPU what its caches hold, on a GPU enough that one kernel fills it.
FLOAT32_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}
# Models that passed `check_logits`, and models that passed `check_packing`.
_CHECKED: WeakSet[Any] = WeakSet()
_PACKABLE: WeakSet[Any] = WeakSet()


def load_model(
    folder: Path,
    dtype: torch.dtype,
    attention_implementation: str,
    device: torch.device,
    *,
    device_map: str | None = None,
    tp_size: int | None = None,
    adapter: Path | None = None,
) -> Any:
    """Load the causal language model in `folder` in `dtype`, in evaluation mode.

    `adapter`: the folder of a LoRA adapter, whose modules PEFT adds to the model's, unmerged and in the same dtype.
    `device_map`: place its layers as transformers' argument says, instead of all on `device`. `tp_size`: divide each
    layer among the processes of the default process group. Raises UnsupportedScoreError if the model's code is not part
    of transformers, or if parameters are missing, which transformers would initialise randomly, and AdapterError.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
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
            **({"device_map": device_map} if device_map is not None else {}),
            **({"tp_plan": "auto", "tp_size": tp_size} if tp_size is not None else {}),
        )
    except (ValueError, ImportError, OSError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise UnsupportedScoreError(f"transformers cannot load the checkpoint: {error}") from error
    lacking = sorted([*loaded["missing_keys"], *(str(key) for key in loaded["mismatched_keys"])])
    if lacking:
        raise UnsupportedScoreError(
            f"{len(lacking)} parameters of the model are missing in the checkpoint or have another shape: {lacking[0]}"
        )
    if adapter is not None:
        model = with_adapter(model, adapter).get_base_model()
    model.eval()
    return model if device_map is not None or tp_size is not None else model.to(device)


class TokenBatch:
    """Rows of a batch as tensors: `ids`, `mask` and `positions` [rows, time]; None: the default of models.

    `tokens` are the places in [T] of the response tokens that have a state before them, in the order of `needed`.

    With `padding` right or left, each rollout is a row, padded to the longest one. With none, all rollouts are
    concatenated in one row without padding or mask; positions that restart show models where a rollout ends.
    """

    def __init__(self, rollouts: RolloutBatch, rows: NDArray[np.int64], padding: str, device: torch.device) -> None:
        tokens = sequences(rollouts, rows)
        self.lengths = np.array([row.size for row in tokens], dtype=np.int64)
        self.is_packed = padding == "none"
        width = int(self.lengths.sum() if self.is_packed else self.lengths.max(initial=1))
        ids = np.zeros((1 if self.is_packed else rows.size, max(width, 1)), dtype=np.int64)
        mask, positions = np.zeros_like(ids), np.zeros_like(ids)
        self._rows = np.zeros_like(self.lengths) if self.is_packed else np.arange(rows.size)
        self._starts = np.zeros_like(self.lengths)
        if self.is_packed:
            self._starts = np.cumsum(self.lengths) - self.lengths
        elif padding == "left":
            self._starts = width - self.lengths
        for place, start, row in zip(self._rows, self._starts, tokens, strict=True):
            span = slice(start, start + row.size)
            ids[place, span], mask[place, span], positions[place, span] = row, 1, np.arange(row.size)
        self.ids = torch.from_numpy(ids).to(device)
        self.mask = None if self.is_packed else torch.from_numpy(mask).to(device)
        # Rows padded on the right have the positions 0, 1, …, the default of models.
        self.positions = None if padding == "right" else torch.from_numpy(positions).to(device)
        self._prompts = np.diff(rollouts.prompt_offsets)[rows]
        starts, stops = rollouts.response_offsets[:-1][rows], rollouts.response_offsets[1:][rows]
        self.num_response_tokens = int((stops - starts).sum())
        # Nothing precedes the first token of a response without a prompt.
        firsts = np.minimum(starts + (self._prompts == 0), stops)
        self._targets = [slice(*each) for each in zip(firsts.tolist(), stops.tolist(), strict=True)]
        self.tokens = np.concatenate([np.arange(each.start, each.stop) for each in self._targets] or [firsts])

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of a model of transformers, or of its decoder, for one pass over all rows."""
        positions = {} if self.positions is None else {"position_ids": self.positions}
        return {"input_ids": self.ids, "attention_mask": self.mask, "use_cache": False, **positions}

    @property
    def owners(self) -> torch.Tensor:
        """The rollout in the batch whose response token follows a position, else −1; shape [rows, time − 1]."""
        owners = np.full((self.ids.shape[0], self.ids.shape[1] - 1), -1, dtype=np.int64)
        for index, (row, start, prompt, length) in enumerate(
            zip(self._rows, self._starts, self._prompts, self.lengths, strict=True)
        ):
            owners[row, start + max(prompt - 1, 0) : start + max(length - 1, 0)] = index
        return torch.from_numpy(owners).to(self.ids.device)

    @property
    def needed(self) -> torch.Tensor:
        """True for positions before a response token, shape [rows, time − 1]."""
        return self.owners >= 0

    def write(self, values: NDArray[Any], into: NDArray[Any]) -> None:
        """Copy the values [rows, time − 1, …] before response tokens to the places of `tokens` in `into` [T, …]."""
        for row, start, prompt, target in zip(self._rows, self._starts, self._prompts, self._targets, strict=True):
            begin = start + max(prompt - 1, 0)
            into[target] = values[row, begin : begin + target.stop - target.start]


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
            own = hidden.to(weight.device, dtype)
            return torch.nn.functional.linear(own, weight, None if bias is None else bias.to(dtype))

    head.forward = forward
    try:
        yield
    finally:
        head.forward = plain


def next_token_log_probs(
    model: Any, batch: TokenBatch, process: LogitProcessing, autocast: torch.dtype | None, logits_bytes: int
) -> torch.Tensor:
    """Return the log-prob of each token given the previous ones, float32 [rows, time − 1], in nats.

    Only positions of `batch.needed` are defined. Logits are cast to float32 before `process` and log-softmax, as in
    trainers. If the logits of the batch need more than `logits_bytes` at 4 bytes each, the head is applied in pieces,
    and only to the positions before response tokens.
    """
    rows, width = batch.ids.shape
    if width < 2:
        return torch.full((rows, 0), torch.nan)
    log_probs = torch.full((rows, width - 1), torch.nan, device=batch.ids.device)
    owners = batch.owners
    row, position = (owners >= 0).nonzero(as_tuple=True)
    owner, tokens = owners[row, position], batch.ids[:, 1:][row, position]
    with precision(batch.ids.device, autocast):
        if batch.ids.numel() * _position_bytes(model) <= logits_bytes:
            logits = model(**batch.inputs).logits
            log_probs[row, position] = log_softmax_at(
                lambda part: logits[row[part], position[part]], tokens, owner, process
            )
            return log_probs
        check_logits(model, batch.ids[:1, :8])
        # With a device map, the last layer and the head may be on other GPUs than the tokens.
        states = model.get_decoder()(**batch.inputs).last_hidden_state.to(batch.ids.device)[row, position]
        found = torch.empty(tokens.shape, device=batch.ids.device)
        size = max(1, logits_bytes // _position_bytes(model))
        for start in range(0, row.numel(), size):
            piece = slice(start, start + size)
            of_piece = _head(model, states[piece])
            found[piece] = log_softmax_at(of_piece.__getitem__, tokens[piece], owner[piece], process)
            del of_piece
        log_probs[row, position] = found
        return log_probs


def _position_bytes(model: Any) -> int:
    """Return the bytes of a position's logits as float32."""
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    return 4 * vocabulary


def log_softmax_at(
    logits_of: Callable[[slice], torch.Tensor], tokens: torch.Tensor, rows: torch.Tensor, process: LogitProcessing
) -> torch.Tensor:
    """Return the log-prob of `tokens` [n] under the processed logits [n, V] of the rollouts `rows` [n].

    `logits_of` returns the logits of a slice of the n. Only a slice at a time is cast to float32, never all of [n, V].
    """
    found = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    start, size = 0, 1
    with torch.autocast(tokens.device.type, enabled=False):
        while start < tokens.numel():
            part = slice(start, start + size)
            logits = process(logits_of(part).float(), rows[part])
            found[part] = torch.log_softmax(logits, dim=-1).gather(-1, tokens[part, None])[:, 0]
            start += size
            size = max(1, FLOAT32_BYTES[tokens.device.type] // (4 * logits.shape[-1]))
    return found


def _head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of `hidden` [..., H]: apply the head, and the soft cap if the model has one."""
    logits: torch.Tensor = model.get_output_embeddings()(hidden).to(hidden.device)
    return soft_capped(logits, soft_cap(model))


def soft_cap(model: Any) -> float:
    """Return the soft cap c of a model's logits, which c·tanh(x/c) bounds; infinity if it has none."""
    return float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or math.inf)


def soft_capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return the logits under a soft cap, rounded as in models."""
    return logits if math.isinf(cap) else torch.tanh(logits / cap) * cap


def check_logits(model: Any, ids: torch.Tensor) -> None:
    """Raise UnsupportedScoreError if the model changes its logits after the head by more than a soft cap."""
    if model in _CHECKED:
        return
    whole = model(input_ids=ids, use_cache=False).logits
    alone = _head(model, model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole, alone, equal_nan=True):
        raise UnsupportedScoreError(
            "the model changes its logits after the head by more than a soft cap, so they cannot be computed in "
            "pieces; raise the scorer's option logits_bytes or lower batch_size until the logits of a batch fit"
        )
    _CHECKED.add(model)


def check_packing(model: Any) -> None:
    """Raise UnsupportedScoreError if a token's hidden state depends on the sequence packed before its own.

    Models that ignore the restart of positions, such as those with recurrent layers, attend across the border.
    """
    if model in _PACKABLE:
        return
    device = model.get_output_embeddings().weight.device
    positions = torch.arange(4, device=device).repeat(2)[None]
    with torch.no_grad():
        after_one, after_other = (
            model.get_decoder()(
                input_ids=torch.tensor([[first] * 4 + [0, 1, 0, 1]], device=device),
                position_ids=positions,
                use_cache=False,
            ).last_hidden_state[0, 4:]
            for first in (0, 1)
        )
    if not torch.allclose(after_one, after_other, rtol=1e-2, atol=1e-2 * float(after_one.abs().max())):
        raise UnsupportedScoreError(
            "the model attends across packed sequences; set the scorer's option padding to right or left"
        )
    _PACKABLE.add(model)


def precision(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast to `dtype`; None: no autocast."""
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()
