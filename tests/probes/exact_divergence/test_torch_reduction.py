"""The reduction in plain torch equals textbook definitions, on a CPU and on a GPU if one is available."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreshock_probes.exact_divergence import GivenLogits, divergences, exact_divergences
from foreshock_probes.exact_divergence.divergences import reduce_in_torch
from tests.probes.exact_divergence.reference import DIVERGENCES, TOP_KS, by_definition, hard_cases, likeliest, overlap

RELATIVE = 1e-11
ABSOLUTE = 1e-14
DEVICES = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


@pytest.fixture(autouse=True, params=[1, 1 << 22], ids=["one row a part", "many rows a part"])
def plain_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreshock_probes.exact_divergence.divergences._PART", request.param)
    monkeypatch.setattr(divergences, "_reduction_on", lambda device: reduce_in_torch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [2, 257, 2500])
def test_hard_logits_give_the_defined_values(vocabulary: int, device: str) -> None:
    for name, (target, behaviour) in hard_cases(vocabulary).items():
        pair = GivenLogits(target.to(device)), GivenLogits(behaviour.to(device))
        found, expected = exact_divergences(*pair, top_ks=TOP_KS), by_definition(target, behaviour)
        for divergence in DIVERGENCES:
            values, message = getattr(found, divergence), f"{name}: {divergence}"
            np.testing.assert_allclose(values, expected[divergence], rtol=RELATIVE, atol=ABSOLUTE, err_msg=message)
            assert (values >= 0.0).all(), message
        for column, k in enumerate(TOP_KS):
            assert found.topk_overlap[:, column].tolist() == overlap(target, behaviour, k), name
        flips = [a != b for a, b in zip(likeliest(target, 1), likeliest(behaviour, 1), strict=True)]
        assert found.top1_flip.tolist() == flips, name


def test_tiny_mismatch_has_small_relative_errors() -> None:
    plain = torch.randn((4, 3000), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    target = plain + 3e-5 * torch.randn((4, 3000), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = exact_divergences(GivenLogits(target), GivenLogits(plain)), by_definition(target, plain)
    for divergence in ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2"):
        np.testing.assert_allclose(getattr(found, divergence), expected[divergence], rtol=1e-9)


def test_identical_logits_give_0_and_invalid_logits_nan() -> None:
    logits = torch.randn((3, 500), generator=torch.Generator().manual_seed(2))
    same = exact_divergences(GivenLogits(logits), GivenLogits(logits.clone()))
    invalid = logits.clone()
    invalid[0, 7], invalid[1, 3], invalid[2] = torch.nan, torch.inf, -torch.inf
    found = exact_divergences(GivenLogits(invalid), GivenLogits(logits))
    for divergence in ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2"):
        assert (getattr(same, divergence) == 0.0).all()
        assert np.isnan(getattr(found, divergence)).all()
    assert not found.top1_flip.any()
