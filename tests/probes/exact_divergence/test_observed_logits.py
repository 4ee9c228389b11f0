"""The hook observes exactly the logits of prompt states, and log-probs of other logits are refused.

The model is called as vLLM's model runners call theirs.
"""

import numpy as np
import pytest
import torch

from foreshock_probes.exact_divergence import pairs
from foreshock_probes.exact_divergence.divergences import exact_divergences

WIDTH, VOCABULARY = 6, 11


class Model(torch.nn.Module):
    """Embeddings, positions and a head, with the two calls that a model of vLLM has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.embeddings(input_ids) + 0.1 * positions.reshape(-1, input_ids.shape[0])[0, :, None]
        return states

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits


class Observed:
    """Positions and logits that the hook passed on."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.logits: list[torch.Tensor] = []

    def add(self, positions: np.ndarray[tuple[int], np.dtype[np.int64]], logits: torch.Tensor) -> None:
        self.positions += positions.tolist()
        self.logits += list(logits.clone())


@torch.no_grad()
def test_only_slices_of_the_models_output_are_observed() -> None:
    model, observed = Model(), Observed()
    pairs.observe_logits(model, observed.add)
    tokens = torch.randint(0, VOCABULARY, (9,))
    whole = model.embeddings(tokens) + 0.1 * torch.arange(9)[:, None]
    for start, stop in ((0, 4), (4, 9)):
        # A step that is padded beyond its tokens; the sampler's row comes before the prompt's.
        padding = torch.zeros(3, dtype=torch.int64)
        ids, positions = torch.cat([tokens[start:stop], padding]), torch.cat([torch.arange(start, stop), padding])
        states = model(input_ids=ids, positions=positions)
        model.compute_logits(states[torch.tensor([stop - start - 1])])
        of_step = states[: stop - start]
        for first in range(0, stop - start, 3):
            given = model.compute_logits(of_step[first : first + 3])
            given.fill_(torch.nan)  # the engine may modify them afterwards
    assert observed.positions == list(range(9))
    torch.testing.assert_close(torch.stack(observed.logits), model.head(whole))


@torch.no_grad()
def test_states_without_known_positions_are_not_observed() -> None:
    model, observed = Model(), Observed()
    pairs.observe_logits(model, observed.add)
    tokens, three_axes = torch.arange(4), torch.arange(4).expand(3, -1)
    model.compute_logits(model(input_ids=tokens, positions=three_axes)[:4])
    model.compute_logits(model(tokens, torch.arange(4))[:4])
    assert observed.positions == []


def test_log_probs_of_other_logits_raise() -> None:
    observed = np.array([-0.1, -30.0, -np.inf, np.nan])
    pairs.check_reproduced(3, observed, observed.astype(np.float32).astype(np.float64) + 1e-6)
    with pytest.raises(pairs.NotReproducedError, match="token 1 of rollout 3"):
        pairs.check_reproduced(3, observed, observed + np.array([0.0, 1e-3, 0.0, 0.0]))
    with pytest.raises(pairs.NotReproducedError, match="1 of 4 tokens differ"):
        pairs.check_reproduced(3, observed, np.array([-0.1, -30.0, -np.inf, -1.0]))


def test_states_missing_repeated_or_out_of_order_raise() -> None:
    random = torch.Generator().manual_seed(0)
    target = {
        "hidden": torch.randn((3, WIDTH), generator=random),
        "weight": torch.randn((VOCABULARY, WIDTH), generator=random),
        "softcap": torch.tensor(torch.inf),
        "divisor": torch.tensor(1.0),
    }
    logits = torch.randn((7, VOCABULARY), generator=random)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.int32)  # a prompt of 4 tokens, whose last state is at position 3
    ids = torch.from_numpy(tokens[4:].astype(np.int64))
    expected = exact_divergences(target["hidden"] @ target["weight"].T, logits[3:6], ids)
    returned = expected["behaviour_log_probs"].numpy()

    def reduce(*chunks: slice) -> pairs.Reduction:
        reduction = pairs.Reduction(target, tokens)
        for chunk in chunks:
            reduction.add(np.arange(7)[chunk], logits[chunk])
        return reduction

    for chunks in ([slice(0, 7)], [slice(0, 2), slice(2, 5), slice(5, 6)]):
        found = reduce(*chunks).finish(0, returned)
        np.testing.assert_allclose(found["kl"], expected["kl"], rtol=1e-5)
    for chunks in ([], [slice(0, 5)], [slice(0, 6), slice(4, 6)], [slice(4, 6), slice(3, 4)]):
        with pytest.raises(pairs.NotReproducedError, match="expected each of its 3 once and in order"):
            reduce(*chunks).finish(0, returned)
    with pytest.raises(pairs.NotReproducedError, match="rollout 5"):
        reduce(slice(0, 7)).finish(5, returned[::-1])
