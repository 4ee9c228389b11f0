"""Forward passes of a torch model with changed positions, changed attention, or a prompt cached by other weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.doctor.changes import CannotTryError, Change
from foreshock.rollouts import RolloutBatch
from foreshock_probes.doctor.tensors import quantised
from foreshock_probes.scorers.forward_pass import precision

ATTENTION = "foreshock_doctor"
"""The name in transformers of the attention whose keys, values and scale can be changed, and whose layers keep their
own windows under any mask."""
_ROWS = 32
_OTHER_ROWS = 1
_LOGITS_AT_ONCE = 1 << 28
"""Most logits of one forward pass; a large vocabulary or a long rollout reduces its rows."""

_edit: tuple[str | None, float] | None = None
"""The format to which keys and values are quantised (None: unchanged) and a factor of the scale; None: no change."""


@contextlib.contextmanager
def refused_by_model() -> Iterator[None]:
    """Turn an error of the model's own code, under a change, into CannotTryError.

    Only calls of the model are within such a block: an exception of the doctor's code is a fault and ends the job.
    """
    try:
        yield
    except (RuntimeError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        raise CannotTryError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}") from error


def _called(model: Any, **inputs: Any) -> Any:
    """Return the output of the model, which is called under a change."""
    with refused_by_model():
        return model(**inputs)


def _capped(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float, cap: float
) -> tuple[torch.Tensor, None]:
    """Return an attention whose scores are soft-capped."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = torch.tanh(query @ key.transpose(2, 3) * (scale / cap)) * cap
    if mask is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    else:
        seen = mask
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    shares = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (shares @ value).transpose(1, 2).contiguous(), None


def _window(queries: int, keys: int, size: int) -> torch.Tensor:
    """Return which keys are within a window around each query; the queries are the last positions."""
    at = torch.arange(keys)
    return (at[keys - queries :, None] - at[None]).abs() < size


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        if _edit is not None:
            kind, factor = _edit
            if kind is not None:
                key, value = quantised(key, kind), quantised(value, kind)
            options["scaling"] = (options.get("scaling") or query.shape[-1] ** -0.5) * factor
        if mask is not None and options.get("sliding_window"):  # transformers gives a mask of ours to all layers alike
            mask = mask & _window(mask.shape[-2], mask.shape[-1], options["sliding_window"])
        if options.get("softcap"):  # which torch's own attention ignores
            return _capped(module, query, key, value, mask, options["scaling"], options["softcap"])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


_register()


@contextlib.contextmanager
def _edited(change: Change) -> Iterator[None]:
    global _edit
    kind, factor = change.get("kv"), change.get("attention_scale", 1.0)
    if kind is not None or factor != 1.0:
        _edit = kind, factor
    try:
        yield
    finally:
        _edit = None


def logits_of(
    model: Any, cached: Any | None, batch: RolloutBatch, change: Change, pad: int, longest_prompt: int
) -> NDArray[np.float32]:
    """Return the logits [T, V] before each response token.

    `cached`: the model with other weights that fills the KV cache of the prompts, except their last token.
    `longest_prompt`: the length of the longest prompt in the logged batch, to which prompts may have been padded.
    """
    prompts, responses = (
        np.split(values, offsets[1:-1])
        for values, offsets in (
            (batch.prompt_token_ids, batch.prompt_offsets),
            (batch.response_token_ids, batch.response_offsets),
        )
    )
    rollouts = [np.concatenate(each) for each in zip(prompts, responses, strict=True)]
    autocast = torch.bfloat16 if change.get("precision") == "autocast" else None
    found: list[NDArray[np.float32]] = []
    with torch.no_grad(), precision(torch.device("cpu"), autocast), _edited(change):
        if cached is not None:
            pairs = zip(rollouts, map(len, prompts), strict=True)
            return np.concatenate([_after_cache(model, cached, *each) for each in pairs])
        longest = max(*map(len, rollouts), longest_prompt)
        most = max(1, min(_ROWS, _LOGITS_AT_ONCE // (longest * model.config.vocab_size)))
        single = change.get("composition") == "other"
        size = _OTHER_ROWS if single else int(change.get("packed", (0,))[0] or most)
        passes = _decoded if change.get("composition") == "decode" else _packed if change.get("packed") else _padded
        for start in range(0, batch.num_rollouts, size):
            part = slice(start, start + size)
            found += passes(model, list(map(len, prompts[part])), rollouts[part], change, pad, longest_prompt)
    return np.concatenate(found)


Rows = list[NDArray[np.int32]]


def _before_response(logits: NDArray[np.float32], prompt: int, length: int) -> NDArray[np.float32]:
    """Return the logits before each response token, of those [time, V] after each token of a rollout.

    The first token of a response without a prompt has none, and its row is not used.
    """
    return logits[prompt - 1 : length - 1] if prompt else np.concatenate([0 * logits[:1], logits[: length - 1]])


def _padded(
    model: Any, prompts: list[int], rows: Rows, change: Change, pad: int, longest_prompt: int
) -> list[NDArray[np.float32]]:
    """Return the logits of each rollout, `prompts` tokens of which are its prompt; each is a row of its own."""
    visible, positions = change.get("visible"), change.get("positions")
    before = [longest_prompt - prompt if visible == "pads" else 0 for prompt in prompts]
    width = max(len(row) + pads for row, pads in zip(rows, before, strict=True))
    if change.get("composition"):
        before = [width - len(row) for row in rows]
    ids = np.full((len(rows), width), pad, dtype=np.int64)
    real = np.zeros((len(rows), width), dtype=bool)
    places = np.zeros_like(ids)
    for row, (tokens, pads, prompt) in enumerate(zip(rows, before, prompts, strict=True)):
        ids[row, pads : pads + len(tokens)] = tokens
        real[row, (0 if visible == "pads" else pads) : pads + len(tokens)] = True
        places[row, pads : pads + len(tokens)] = _positions(positions, prompt, len(tokens), longest_prompt)
        if visible == "pads":
            places[row] = np.arange(width)
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "use_cache": False}
    if positions is not None or change.get("composition"):
        inputs["position_ids"] = torch.from_numpy(places)
    if visible is None:
        inputs["attention_mask"] = torch.from_numpy(real.astype(np.int64))
    else:
        inputs["attention_mask"] = torch.from_numpy(_mask(visible, real, prompts))
    logits = _called(model, **inputs).logits.float().numpy()
    return [
        _before_response(logits[row, pads:], prompt, len(tokens))
        for row, (tokens, pads, prompt) in enumerate(zip(rows, before, prompts, strict=True))
    ]


def _decoded(
    model: Any, prompts: list[int], rows: Rows, change: Change, pad: int, longest_prompt: int
) -> list[NDArray[np.float32]]:
    """Return the logits of each rollout, decoded token by token with a cache as an engine does."""
    firsts = [max(prompt, 1) for prompt in prompts]
    width, steps = max(firsts), max(len(row) - first for row, first in zip(rows, firsts, strict=True))
    ids = np.full((len(rows), width + steps), pad, dtype=np.int64)
    seen, places = np.ones_like(ids), np.zeros_like(ids)
    for row, (tokens, first) in enumerate(zip(rows, firsts, strict=True)):
        before = width - first
        ids[row, before : before + len(tokens)] = tokens
        seen[row, :before] = 0
        places[row, before:] = np.arange(width + steps - before)
    past, logits = None, []
    for start, stop in [(0, width), *((step, step + 1) for step in range(width, width + steps - 1))]:
        output = _called(
            model,
            input_ids=torch.from_numpy(ids[:, start:stop]),
            attention_mask=torch.from_numpy(seen[:, :stop]),
            position_ids=torch.from_numpy(places[:, start:stop]),
            past_key_values=past,
            use_cache=True,
        )
        past = output.past_key_values
        logits.append(output.logits[:, -1].float().numpy())
    decoded = np.stack(logits, axis=1)
    return [
        _before_response(decoded[row], min(prompt, 1), len(tokens) - first + 1)
        for row, (tokens, first, prompt) in enumerate(zip(rows, firsts, prompts, strict=True))
    ]


def _positions(kind: str | None, prompt: int, length: int, longest_prompt: int) -> NDArray[np.int64]:
    """Return the position of each token of a rollout."""
    plain = np.arange(length)
    response = plain >= prompt
    if kind == "zero":
        return np.zeros_like(plain)
    moved = {"restart": -prompt, "gap": longest_prompt - prompt, "response-1": -1, "response+1": 1}.get(kind or "", 0)
    return plain + moved * response


def _mask(visible: Any, real: NDArray[np.bool_], prompts: list[int]) -> NDArray[np.bool_]:
    """Return the attention mask, True where a position may attend, [rows, 1, time, time]."""
    width = real.shape[1]
    query, key = np.arange(width)[:, None], np.arange(width)[None]
    allowed = np.broadcast_to(key <= query, (real.shape[0], width, width)).copy()
    kind, size = visible if isinstance(visible, tuple) else (visible, 0)
    if kind == "window":
        allowed &= query - key < size
    elif kind == "bidirectional":
        allowed[:] = True
    for row, prompt in enumerate(prompts):
        if kind == "response_only":
            allowed[row] &= (key >= prompt) | (query < prompt)
        elif kind == "no_first":
            allowed[row] &= (key > 0) | (query == 0)
    allowed &= real[:, None, :]
    allowed |= (query == key)[None]
    return allowed[:, None]


def _packed(
    model: Any, prompts: list[int], rows: Rows, change: Change, pad: int, longest_prompt: int
) -> list[NDArray[np.float32]]:
    """Return the logits of rollouts concatenated without borders: each rollout attends to the ones before it."""
    _, resets = change.get("packed")
    ids = torch.from_numpy(np.concatenate(rows).astype(np.int64))[None]
    width = ids.shape[1]
    places = np.concatenate([np.arange(len(row)) for row in rows]) if resets else np.arange(width)
    mask = torch.ones(1, 1, width, width, dtype=torch.bool).tril()
    logits = _called(
        model, input_ids=ids, position_ids=torch.from_numpy(places)[None], attention_mask=mask, use_cache=False
    ).logits[0]
    ends = np.cumsum([len(row) for row in rows])
    return [
        _before_response(logits[end - len(row) : end].float().numpy(), prompt, len(row))
        for row, prompt, end in zip(rows, prompts, ends.tolist(), strict=True)
    ]


def _after_cache(model: Any, cached: Any, row: NDArray[np.int32], prompt: int) -> NDArray[np.float32]:
    if prompt < 2 or len(row) == prompt:
        raise CannotTryError("a prompt of one token has no cache, or a response is empty")
    ids = torch.from_numpy(row.astype(np.int64))[None]
    past = _called(cached, input_ids=ids[:, : prompt - 1], use_cache=True).past_key_values
    logits = _called(model, input_ids=ids[:, prompt - 1 : -1], past_key_values=past, use_cache=True).logits
    return np.asarray(logits[0].float().numpy())
