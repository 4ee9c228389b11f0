"""Sampling distributions are those that an engine computes, and fits recover their parameters."""

from dataclasses import replace

import numpy as np
import pytest

from foreshock.doctor import Change
from foreshock.doctor.evidence import Compared
from foreshock.doctor.fits import Fitting, drawn, fitted, selected
from foreshock.doctor.sampling import Sampling
from tests.foreshock.doctor.fake import VOCABULARY, FakeExperimenter, logged, rollouts

BATCH = rollouts(2)
LAB = FakeExperimenter(BATCH)
LOGITS = LAB.logits(Change.of(weights="step_10"))


def _compared(sampling: Sampling) -> Compared:
    plain = Compared.of(BATCH, logged(LAB))
    values = sampling.log_probs(LOGITS, plain)
    return Compared.of(BATCH, np.where(np.isfinite(values), values, np.nan).astype(np.float32))


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_renormalises() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    batch = rollouts().select([0])
    one = Compared.of(batch, np.zeros(batch.num_tokens, np.float32)).at(np.array([0]))
    assert np.exp(Sampling(top_p=0.7).log_probs(logits, _with_id(one, 1))) == pytest.approx([0.3 / 0.8])


def test_a_sampled_token_is_kept_whatever_rounding_says_of_the_border() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    batch = rollouts().select([0])
    one = Compared.of(batch, np.zeros(batch.num_tokens, np.float32)).at(np.array([0]))
    assert np.exp(Sampling(top_p=0.7).log_probs(logits, _with_id(one, 2))) == pytest.approx([0.15 / 0.95])


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7, top_p=0.9), Sampling(repetition=1.3, frequency=0.2)])
def test_log_probs_do_not_depend_on_the_size_of_a_chunk(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Compared.of(BATCH, logged(LAB))
    whole = sampling.log_probs(LOGITS, plain)
    monkeypatch.setattr("foreshock.doctor.sampling._LOGITS_AT_ONCE", 50)
    assert np.array_equal(sampling.log_probs(LOGITS, plain), whole)


def _with_id(compared: Compared, token: int) -> Compared:
    compared.ids[:] = token
    return compared


@pytest.mark.parametrize(
    ("fit", "sampling", "value"),
    [
        ("temperature", Sampling(temperature=0.6), 0.6),
        ("top_p", Sampling(top_p=0.9), 0.9),
        ("top_k", Sampling(top_k=5), 5),
        ("min_p", Sampling(min_p=0.1), 0.1),
        ("repetition", Sampling(repetition=1.3), 1.3),
        ("repetition_of_response", Sampling(repetition_of_response=1.3), 1.3),
        ("presence", Sampling(presence=0.7), 0.7),
        ("frequency", Sampling(frequency=0.4), 0.4),
        ("softcap", Sampling(softcap=3.0), 3.0),
    ],
)
def test_a_fit_recovers_its_parameter(fit: str, sampling: Sampling, value: float) -> None:
    compared = _compared(sampling)
    found = fitted([fit], Fitting(LOGITS, compared), Sampling())
    assert found is not None
    assert getattr(found, fit) == pytest.approx(value, rel=0.06)
    assert compared.gap(found.log_probs(LOGITS, compared)) < 1e-6


def test_biased_and_banned_ids_are_found() -> None:
    compared = _compared(Sampling(biases=((3, 1.0), (7, -np.inf))))
    found = fitted(["biases"], Fitting(LOGITS, compared), Sampling())
    assert found is not None
    biases = dict(found.biases)
    assert biases[7] == -np.inf
    assert biases[3] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("ends", [(1,), (1, 5, 9)])
def test_ends_banned_at_first_tokens_are_found(ends: tuple[int, ...]) -> None:
    """One end is known; the others were not sampled early, and follow from what the known one leaves."""
    early = Compared.of(BATCH, logged(LAB))
    banned = Sampling(banned_until=(ends, 4))
    values = banned.log_probs(LOGITS, early)  # −∞ where the rollouts have a banned id
    compared = Compared.of(BATCH, np.where(np.isfinite(values), values, np.nan).astype(np.float32))
    compared.ids[(early.position < 4) & np.isin(early.ids, ends)] = 0
    found = fitted(["banned_until"], Fitting(LOGITS, compared, (1,)), Sampling())
    assert found is not None
    assert found.banned_until == (ends, 4)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.6, top_p=0.95), Sampling(temperature=1.3, top_k=6),
        Sampling(temperature=0.7, presence=0.6), Sampling(top_p=0.8, repetition=1.2),
        Sampling(presence=0.5, frequency=0.3, temperature=0.8), Sampling(presence=1.0, top_p=0.9),
    ],
)  # fmt: skip
def test_parameters_are_chosen_and_fitted_together(sampling: Sampling) -> None:
    compared = _compared(sampling)
    known = ("temperature", "top_p", "top_k", "repetition", "presence", "frequency")
    wanted = {each for each in known if getattr(sampling, each) != getattr(Sampling(), each)}
    names = selected(Fitting(LOGITS, compared), Sampling())
    found = fitted(names, Fitting(LOGITS, compared), Sampling())
    assert found is not None
    assert set(names) == wanted
    for name in wanted:
        assert getattr(found, name) == pytest.approx(getattr(sampling, name), rel=0.03)


def test_a_token_of_another_expert_hides_no_parameter() -> None:
    exact = _compared(Sampling(top_k=6, top_p=0.8))
    values = exact.logged + np.random.default_rng(4).normal(0, 0.01, BATCH.num_tokens)
    values[np.argmax(values)] -= 1.6
    names = selected(Fitting(LOGITS, Compared.of(BATCH, values.astype(np.float32))), Sampling())
    assert set(names) == {"top_k", "top_p"}


def test_a_bias_of_each_id_is_found() -> None:
    biases = tuple(enumerate(np.random.default_rng(5).normal(0, 1.1, VOCABULARY).tolist()))
    compared = _compared(Sampling(biases=biases))
    found = fitted(["bias_of_ids"], Fitting(LOGITS, compared), Sampling())
    assert found is not None
    assert compared.gap(found.log_probs(LOGITS, compared)) < 1e-4


def test_a_temperature_of_1_is_not_named_beside_another_parameter() -> None:
    values = _compared(Sampling(biases=((3, 1.0),), temperature=1.002)).logged
    names = selected(Fitting(LOGITS, Compared.of(BATCH, values.astype(np.float32))), Sampling())
    assert "temperature" not in names


def test_noise_and_one_parameter_choose_no_further_ones() -> None:
    noise = np.random.default_rng(4).normal(0, 0.01, BATCH.num_tokens)
    for sampling in (Sampling(), Sampling(temperature=0.8)):
        exact = _compared(sampling)
        compared = Compared.of(BATCH, (exact.logged + noise).astype(np.float32))
        names = selected(Fitting(LOGITS, compared), Sampling())
        assert names == (() if sampling.temperature == 1.0 else ("temperature",))


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("top_k", Sampling(top_k=4)), ("top_p", Sampling(top_p=0.7)), ("min_p", Sampling(min_p=0.2)),
        (None, Sampling(temperature=0.6)), (None, Sampling()),
    ],
)  # fmt: skip
def test_tokens_show_what_raw_log_probs_do_not(name: str | None, sampling: Sampling) -> None:
    plain = Compared.of(BATCH, logged(LAB))
    values = LOGITS.astype(np.float64) / sampling.temperature
    shares = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
    before = np.where(shares[:, None, :] > shares[:, :, None], shares[:, None, :], 0.0)  # what is above each id
    kept = before.sum(axis=2) < sampling.top_p
    kept &= (before > 0).sum(axis=2) < (sampling.top_k or VOCABULARY)
    kept &= shares >= sampling.min_p * shares.max(axis=1, keepdims=True)
    running = np.cumsum(shares * kept, axis=1)
    drawn_at = np.random.default_rng(6).random(plain.ids.size)[:, None] * running[:, -1:]
    sampled = (drawn_at > running).sum(axis=1)
    found = drawn(Fitting(LOGITS, replace(plain, ids=sampled.astype(np.int32))), Sampling())
    assert (found[0] if found else None) == name
    if found is not None:
        assert found[1] == pytest.approx(getattr(sampling, found[0]), rel=0.1)
