"""Hidden states of vLLM's prefill: hooks in this process observe the decoder layers of its model.

vLLM computes all tokens of a step as one row [tokens, H]. The sequences of a batch that fits into one step come in
their order, a longer one in parts; the model's arguments `input_ids` and `positions` must be those of the sequences. A
layer of vLLM returns its output and the residual separately; the state is their sum, in the model's dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock_probes.layer_divergence.states import Observe, StatesMissingError
from foreshock_probes.layer_divergence.torch_states import observed
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel, parse_options
from foreshock_probes.scorers.tokens import compose, sequence_lengths, sequences
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
        self._rollouts = request.rollouts
        prepared = prepare_engine(request, options, warm)
        self._engine = prepared.engine
        self._model, self._layers = self._engine.apply(_model_and_layers)
        self.places = len(self._layers) + 2
        self.size = int(self._engine.apply(lambda model: model.config.get_text_config().hidden_size))
        # Batches that fit into one step each, so that a sequence is cut only if it is alone.
        most_rows, most_tokens = self._engine.step_limits
        rows, lengths = min(options.batch_size, most_rows), sequence_lengths(request.rollouts)
        self._plan = compose(lengths, rows, request.variant, batch_tokens=most_tokens, packed=True)
        self.fingerprint = prepared.fingerprint(request, options, self._plan.name)

    def run(self, numbers: Int64, observe: Observe, report: Report) -> None:
        """Pass `observe` the chosen states; see `states.HiddenStates`."""
        rollouts, done = self._rollouts, 0
        lengths = sequence_lengths(rollouts)
        for rows in self._plan.batches:
            chosen = rows[lengths[rows] >= 2]
            tokens = sequences(rollouts, chosen)
            wanted = [np.full(each.size, -1, np.int64) for each in tokens]
            for row, of_row in zip(chosen, wanted, strict=True):
                # The first token of a rollout without a prompt has no state before it.
                found = numbers[slice(*rollouts.response_offsets[row : row + 2])][1 - of_row.size :]
                of_row[of_row.size - 1 - found.size : -1] = found
            with _observed(self._model, self._layers, tokens, wanted, observe):
                self._engine.prefill(tokens)
            done += int(rollouts.response_lengths[rows].sum())
            report(done)


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
def _observed(
    model: Any, layers: list[Any], tokens: list[NDArray[np.int32]], wanted: list[Int64], observe: Observe
) -> Iterator[None]:
    """Within the block, observe the input of the first layer and the outputs of each layer and of the model.

    The engine gets the sequences `tokens`; `wanted` has the number of each of their states, −1: not wanted. Raises
    StatesMissingError if it computes other tokens, or another order. The decoder itself gets no hooks, because vLLM
    calls the `forward` of a module that it may compile.
    """
    expected = [(token, position) for each in tokens for position, token in enumerate(each.tolist())]
    left = np.concatenate(wanted) if wanted else np.zeros(0, np.int64)
    numbers = np.zeros(0, np.int64)

    def give(place: int, states: torch.Tensor) -> None:
        wanted = np.flatnonzero(numbers >= 0)
        if wanted.size:
            chosen = states[torch.from_numpy(wanted).to(states.device)]
            observe(place, numbers[wanted], chosen.float().cpu().numpy())

    def starts(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal numbers, left
        given = dict(zip(("input_ids", "positions"), arguments, strict=False)) | named
        ids, positions = given.get("input_ids"), given.get("positions")
        if not isinstance(ids, torch.Tensor) or not isinstance(positions, torch.Tensor) or positions.ndim != 1:
            raise StatesMissingError("this release of vLLM does not give its model token ids and positions")
        # What follows the last sequence is padding or was generated.
        start, size = len(expected) - left.size, min(ids.numel(), left.size)
        if list(zip(ids[:size].tolist(), positions[:size].tolist(), strict=True)) != expected[start : start + size]:
            raise StatesMissingError("this release of vLLM computes the sequences of a batch in another order")
        numbers, left = left[:size], left[size:]

    handle = model.register_forward_pre_hook(starts, with_kwargs=True)
    try:
        with observed([*layers, model], give, _state_of):
            yield
    finally:
        handle.remove()


def _state_of(output: Any) -> torch.Tensor:
    """Return the state of a layer's output, which may hold its residual separately."""
    parts = [each for each in (output if isinstance(output, tuple) else (output,)) if each is not None]
    are_states = all(isinstance(each, torch.Tensor) and each.ndim == 2 and each.is_floating_point() for each in parts)
    if not are_states or not 1 <= len(parts) <= 2:
        raise StatesMissingError(f"a layer of vLLM returned {type(output).__name__}, expected its state and a residual")
    state: torch.Tensor = sum(parts[1:], start=parts[0])
    return state
