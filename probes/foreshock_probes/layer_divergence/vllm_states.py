"""Hidden states of vLLM's prefill: hooks in this process observe the decoder layers of its model.

vLLM computes all tokens of a step as one row [tokens, H], whichever sequences they belong to. The model's arguments
`input_ids` and `positions` identify the sequence: a part of it has consecutive positions and the sequence's tokens. A
layer of vLLM returns its output and the residual separately; the state is their sum, in the model's dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock_probes.layer_divergence.states import Observe, StatesMissingError
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel, parse_options
from foreshock_probes.scorers.tokens import (
    Composition,
    compose,
    known_states,
    sequence,
    sequence_lengths,
    tokens_of_states,
)
from foreshock_probes.scorers.vllm_engine import VllmOptions, prepare_engine

Int64 = NDArray[np.int64]


class VllmStates:
    """The hidden states of `vllm.prefill`.

    Raises UnsupportedScoreError if the model is in other processes, is compiled (hooks in it are never called), or has
    no list of decoder layers.
    """

    def __init__(self, request: ScoreRequest, warm: WarmModel) -> None:
        options = parse_options(VllmOptions, request)
        if options.tensor_parallel_size != 1 or not options.enforce_eager:
            raise UnsupportedScoreError(
                "hidden states need tensor_parallel_size=1 and enforce_eager=true, got "
                f"{options.tensor_parallel_size} and {str(options.enforce_eager).lower()}"
            )
        options = options.model_copy(update={"temperature": 1.0})  # the states do not depend on it
        self._request, self._options = request, options
        prepared = prepare_engine(request, options, warm)
        self._engine = prepared.engine
        self._model, self._layers = self._engine.apply(_model_and_layers)
        self.places = len(self._layers) + 2
        self.size = int(self._engine.apply(lambda model: model.config.get_text_config().hidden_size))
        self.fingerprint = prepared.fingerprint(request, options, self._plan(request.variant).name)

    def run(self, variant: str, tokens: Int64, observe: Observe, report: Report) -> None:
        """Pass `observe` the states before the response tokens `tokens`; see `states.HiddenStates`."""
        rollouts = self._request.rollouts
        lengths, known, done = sequence_lengths(rollouts), known_states(rollouts), 0
        numbers = np.full(rollouts.num_tokens, -1, np.int64)
        numbers[tokens] = np.arange(tokens.size)
        for rows in self._plan(variant).batches:
            places = SequencePlaces()
            chosen = [int(row) for row in rows if lengths[row] >= 2]
            for row in chosen:
                found = numbers[tokens_of_states(rollouts, np.array([row]), known)]
                wanted = np.full(lengths[row], -1, np.int64)
                wanted[lengths[row] - 1 - found.size : -1] = found
                places.add(sequence(rollouts, row), wanted)
            with _observed(self._model, self._layers, places, observe):
                self._engine.prefill([sequence(rollouts, row) for row in chosen])
            done += int(sum(rollouts.response_lengths[row] for row in rows.tolist()))
            report(done)

    def _plan(self, variant: str) -> Composition:
        """Return batches that fit into one step each, so that a sequence is cut only if it is alone.

        A part of a cut sequence may be too short to identify the sequence.
        """
        most_rows, most_tokens = self._engine.step_limits
        rows, lengths = min(self._options.batch_size, most_rows), sequence_lengths(self._request.rollouts)
        return compose(lengths, rows, variant, batch_tokens=most_tokens, packed=True)


class SequencePlaces:
    """The sequences that are submitted together, and their wanted states."""

    def __init__(self) -> None:
        self._sequences: list[tuple[NDArray[np.int32], Int64]] = []
        self._done: list[int] = []

    def add(self, tokens: NDArray[np.int32], wanted: Int64) -> None:
        """Add a sequence [n]; `wanted` [n] has the number of each state, −1: not wanted."""
        self._sequences.append((tokens, wanted))
        self._done.append(0)

    def numbers_of(self, tokens: Int64, positions: Int64) -> Int64:
        """Return the number of the state of each token of a step, [tokens]; −1: not wanted.

        The longest part is assigned first, to the sequence of which it continues the most tokens. Tokens of no sequence
        are padding or were generated after the end of a prompt.
        """
        found = np.full(tokens.size, -1, np.int64)
        borders = np.flatnonzero(np.diff(positions) != 1) + 1
        ends = [*borders.tolist(), tokens.size]
        parts = list(zip([0, *borders.tolist()], ends, strict=True)) if tokens.size else []
        while parts:
            start, end = parts.pop(parts.index(max(parts, key=lambda part: part[1] - part[0])))
            sizes = [self._size(index, tokens[start:end], positions[start:end]) for index in range(len(self._done))]
            size = max(sizes, default=0)
            if size > 0:
                index = sizes.index(size)
                done, wanted = self._done[index], self._sequences[index][1]
                found[start : start + size] = wanted[done : done + size]
                self._done[index] += size
            start += max(size, 1)
            if start < end:  # a part of another sequence follows, whose position happens to be the next one
                parts.append((start, end))
        return found

    def _size(self, index: int, tokens: Int64, positions: Int64) -> int:
        """Return how many of the tokens are the next ones of a sequence."""
        row, done = self._sequences[index][0], self._done[index]
        most = min(row.size - done, tokens.size)
        same = (tokens[:most] == row[done : done + most]) & (positions[:most] == np.arange(done, done + most))
        return int(most if same.all() else np.argmin(same))


def _model_and_layers(model: Any) -> tuple[Any, list[Any]]:
    """Return a model of vLLM and its decoder layers. Raises UnsupportedScoreError if it has no list of them."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not len(layers):
        raise UnsupportedScoreError(
            f"vLLM's {type(model).__name__} has no list of decoder layers (model.layers), so its hidden states cannot "
            "be compared by layer"
        )
    return model, list(layers)


@contextmanager
def _observed(model: Any, layers: list[Any], sequences: SequencePlaces, observe: Observe) -> Iterator[None]:
    """Within the block, observe the input of the first layer and the outputs of each layer and of the model.

    The decoder itself gets no hooks, because vLLM calls the `forward` of a module that it may compile.
    """
    numbers = np.zeros(0, np.int64)

    def give(place: int, states: torch.Tensor) -> None:
        wanted = np.flatnonzero(numbers >= 0)
        if wanted.size:
            chosen = states[torch.from_numpy(wanted).to(states.device)]
            observe(place, numbers[wanted], chosen.float().cpu().numpy())

    def starts(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal numbers
        given = dict(zip(("input_ids", "positions"), arguments, strict=False)) | named
        ids, positions = given.get("input_ids"), given.get("positions")
        if not isinstance(ids, torch.Tensor) or not isinstance(positions, torch.Tensor) or positions.ndim != 1:
            raise StatesMissingError("this release of vLLM does not give its model token ids and positions")
        numbers = sequences.numbers_of(_numpy(ids), _numpy(positions))

    def before(layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        floats = [each for each in (*arguments, *named.values()) if _is_states(each)]
        give(0, floats[0])

    def after(place: int) -> Callable[..., None]:
        return lambda layer, arguments, output: give(place, _state_of(output))

    handles = [
        model.register_forward_pre_hook(starts, with_kwargs=True),
        layers[0].register_forward_pre_hook(before, with_kwargs=True),
        *(layer.register_forward_hook(after(number + 1)) for number, layer in enumerate(layers)),
        model.register_forward_hook(after(len(layers) + 1)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _state_of(output: Any) -> torch.Tensor:
    """Return the state of a layer's output, which may hold its residual separately."""
    if _is_states(output):
        output = (output,)
    parts = [each for each in output if each is not None] if isinstance(output, tuple) else []
    if not 1 <= len(parts) <= 2 or not all(_is_states(each) for each in parts):
        raise StatesMissingError(f"a layer of vLLM returned {type(output).__name__}, expected its state and a residual")
    state: torch.Tensor = sum(parts[1:], start=parts[0])
    return state


def _is_states(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.is_floating_point()


def _numpy(values: torch.Tensor) -> Int64:
    found: Int64 = values.cpu().numpy().astype(np.int64)
    return found
