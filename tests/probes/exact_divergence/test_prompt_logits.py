"""Whose logits are seen, and that log-probs of others are refused: on a model called as vLLM's runners call theirs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probes.exact_divergence import GivenLogits, LogitSource, exact_divergences
from probes.exact_divergence.engine_side import NotReproducedError, Watching, check_reproduced
from probes.exact_divergence.prompt_logits import PromptLogits

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


class Seen:
    """What was taken, by position."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.logits: list[torch.Tensor] = []

    def take(self, positions: np.ndarray[tuple[int], np.dtype[np.int64]], logits: torch.Tensor) -> None:
        self.positions += positions.tolist()
        self.logits += list(logits.clone())


@torch.no_grad()
def test_slices_of_what_the_model_returned_are_prompt_states_and_the_samplers_copies_are_not() -> None:
    model, seen = Model(), Seen()
    PromptLogits(seen.take).attach(model)
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
            given.fill_(torch.nan)  # whatever the engine does with them afterwards
    assert seen.positions == list(range(9))
    torch.testing.assert_close(torch.stack(seen.logits), model.head(whole))


@torch.no_grad()
def test_states_whose_positions_are_not_told_are_not_seen() -> None:
    model, seen = Model(), Seen()
    PromptLogits(seen.take).attach(model)
    tokens, three_axes = torch.arange(4), torch.arange(4).expand(3, -1)
    model.compute_logits(model(input_ids=tokens, positions=three_axes)[:4])
    model.compute_logits(model(tokens, torch.arange(4))[:4])
    assert seen.positions == []


def test_log_probs_of_other_logits_are_refused() -> None:
    seen = np.array([-0.1, -30.0, -np.inf, np.nan])
    check_reproduced(3, seen, seen.astype(np.float32).astype(np.float64) + 1e-6)
    with pytest.raises(NotReproducedError, match="token 1 of rollout 3"):
        check_reproduced(3, seen, seen + np.array([0.0, 1e-3, 0.0, 0.0]))
    with pytest.raises(NotReproducedError, match="1 of 4 tokens differ"):
        check_reproduced(3, seen, np.array([-0.1, -30.0, -np.inf, -1.0]))


def test_a_state_that_was_not_seen_once_in_its_order_is_refused() -> None:
    random = torch.Generator().manual_seed(0)
    target = LogitSource(torch.randn((4, WIDTH), generator=random), torch.randn((VOCABULARY, WIDTH), generator=random))
    logits = torch.randn((7, VOCABULARY), generator=random)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.int32)  # a prompt of 4 tokens, whose last state is at position 3
    expected = exact_divergences(
        LogitSource(target.hidden[1:], target.weight), GivenLogits(logits[3:6]), token_ids=tokens[4:]
    )
    assert expected.behaviour_log_probs is not None

    def watched(*chunks: slice) -> Watching:
        watching = Watching(target, (8, 20))
        watching.begin(tokens, first=1, prompt=4)
        for chunk in chunks:
            watching.take(np.arange(7)[chunk], logits[chunk])
        return watching

    for chunks in ([slice(0, 7)], [slice(0, 2), slice(2, 5), slice(5, 6)]):
        watching = watched(*chunks)
        watching.end(0, expected.behaviour_log_probs)
        np.testing.assert_allclose(watching.found().kl, expected.kl, rtol=1e-5)
    for chunks in ([], [slice(0, 5)], [slice(0, 6), slice(4, 6)], [slice(4, 6), slice(3, 4)]):
        with pytest.raises(NotReproducedError, match="not of its 3 one after the other"):
            watched(*chunks).end(0, expected.behaviour_log_probs)
    with pytest.raises(NotReproducedError, match="rollout 5"):
        watched(slice(0, 7)).end(5, expected.behaviour_log_probs[::-1])
