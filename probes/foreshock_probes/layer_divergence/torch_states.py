"""Hidden states of torch's forward passes: hooks observe the layers of the decoder stack."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreshock.fingerprint import Fingerprint
from foreshock_probes.layer_divergence.states import Observe
from foreshock_probes.scorers.forward_pass import TokenBatch, precision
from foreshock_probes.scorers.request import Report, ScoreRequest, UnsupportedScoreError, WarmModel
from foreshock_probes.scorers.torch_forward import ForwardPass, forward_options, prepare_forward_pass

# Names of the list of decoder layers in transformers; GPT-2's is `h`.
_STACKS = ("layers", "h", "blocks")


class TorchStates:
    """The hidden states of a forward pass with the scorer's options, in the scorer's batches.

    The head is not computed, so `head_dtype`, `temperature` and `truncation` have no effect. Raises
    UnsupportedScoreError if the model has no list of decoder layers.
    """

    def __init__(self, request: ScoreRequest, warm: WarmModel) -> None:
        options = forward_options(request).model_copy(
            update={"temperature": 1.0}
        )  # no logits are computed, so a truncated run need not be refused
        self._request, self._options = request, options
        self._forward: ForwardPass = prepare_forward_pass(request, options, warm)
        self._layers = decoder_layers(self._forward.model)
        self.places = len(self._layers) + 2
        self.size = int(self._forward.model.config.get_text_config().hidden_size)
        self.fingerprint: Fingerprint = self._forward.fingerprint

    def run(self, numbers: NDArray[np.int64], observe: Observe, report: Report) -> None:
        """Pass `observe` the chosen states; see `states.HiddenStates`."""
        rollouts, device = self._request.rollouts, self._forward.device
        done = 0
        for rows in self._forward.plan.batches:
            batch = TokenBatch(rollouts, rows, self._options.padding, device)
            found = numbers[batch.tokens]
            if (found >= 0).any():
                chosen = batch.needed.nonzero()[torch.from_numpy(found >= 0).to(device)]
                self._run_batch(batch, chosen, found[found >= 0], observe)
            done += batch.num_response_tokens
            report(done)

    def _run_batch(self, batch: TokenBatch, chosen: torch.Tensor, at: NDArray[np.int64], observe: Observe) -> None:
        """Run the decoder on a batch; `chosen` [k, 2] are the rows and positions of the states `at` [k]."""
        row, position = chosen.unbind(1)

        def give(place: int, states: torch.Tensor) -> None:
            observe(place, at, states[row, position].float().cpu().numpy())

        with (
            torch.no_grad(),
            precision(batch.ids.device, self._forward.autocast),
            observed(list(self._layers), give, _state_of),
        ):
            decoder = self._forward.model.get_decoder()
            give(self.places - 1, decoder(**batch.inputs).last_hidden_state)


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """Return the layers of the model's decoder in their order. Raises UnsupportedScoreError if there is no list."""
    decoder = model.get_decoder()
    for name in _STACKS:
        layers = getattr(decoder, name, None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers):
            return layers
    raise UnsupportedScoreError(
        f"{type(model).__name__} has no list of decoder layers ({', '.join(_STACKS)}), so its hidden states cannot be "
        "compared by layer"
    )


@contextmanager
def observed(
    layers: Sequence[torch.nn.Module],
    give: Callable[[int, torch.Tensor], None],
    state_of: Callable[[Any], torch.Tensor],
) -> Iterator[None]:
    """Within the block, pass `give` the input of the first layer (place 0) and `state_of` the output of each."""

    def before(layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = (each for each in (*arguments, *named.values()) if isinstance(each, torch.Tensor))
        give(0, next(each for each in tensors if each.is_floating_point()))

    def after(place: int) -> Callable[..., None]:
        return lambda layer, arguments, output: give(place, state_of(output))

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [layer.register_forward_hook(after(number + 1)) for number, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _state_of(output: Any) -> torch.Tensor:
    state: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return state
