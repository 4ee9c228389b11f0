"""The Triton kernel equals textbook definitions (in Triton's interpreter, on a GPU if available) and compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from foreshock_probes.exact_divergence import GivenLogits, exact_divergences
from tests.paths import REPOSITORY
from tests.probes.exact_divergence.reference import (
    DIVERGENCES,
    TOP_KS,
    Pair,
    by_definition,
    hard_cases,
    likeliest,
    overlap,
)

pytest.importorskip("triton")

RELATIVE = 5e-6
ABSOLUTE = 1e-9
# 1 minus a float32 sum of probabilities near 1.
ABSOLUTE_OF = {"mean_ratio": 2e-7}
# The largest float32 sum: a χ² above it is infinite on a GPU.
LARGEST = 3e38
MODULE = "tests.probes.exact_divergence.interpreted"

Arrays = dict[str, NDArray[np.float64]]


def run(folder: Path, *arguments: str, interpret: bool) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONWARNINGS": "default"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    folder = tmp_path_factory.mktemp("interpreted")
    run(folder, str(folder / "out.npz"), interpret=True)
    with np.load(folder / "out.npz") as arrays:
        return dict(arrays)


def assert_as_defined(name: str, pair: Pair, found: Arrays) -> None:
    """Assert that each divergence of the case `name` equals its definition."""
    expected = by_definition(*pair)
    for divergence in DIVERGENCES:
        values, message = found[divergence], f"{name}: {divergence}"
        limited = np.where(expected[divergence] > LARGEST, np.inf, expected[divergence])
        absolute = ABSOLUTE_OF.get(divergence, ABSOLUTE)
        np.testing.assert_allclose(values, limited, rtol=RELATIVE, atol=absolute, err_msg=message)
        assert (values >= 0.0).all(), message
    if name.startswith("tiny mismatch"):
        for divergence in ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2"):
            message = f"{name}: {divergence}"
            np.testing.assert_allclose(found[divergence], expected[divergence], rtol=2e-3, err_msg=message)


@pytest.mark.slow
def test_hard_logits_give_the_defined_values(interpreted: Arrays) -> None:
    from tests.probes.exact_divergence.interpreted import cases

    for name, pair in cases().items():
        if name != "invalid":
            assert_as_defined(name, pair, {key: interpreted[f"{name}: {key}"] for key in DIVERGENCES})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_hard_logits_give_the_defined_values_on_a_gpu() -> None:
    # The last one, because the first is where everything goes that does not say where.
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    for name, (target, behaviour) in hard_cases(9_000).items():
        found = exact_divergences(GivenLogits(target.to(device)), GivenLogits(behaviour.to(device)), top_ks=TOP_KS)
        assert_as_defined(name, (target, behaviour), {key: getattr(found, key) for key in DIVERGENCES})
        for column, k in enumerate(TOP_KS):
            assert found.topk_overlap[:, column].tolist() == overlap(target, behaviour, k), name


@pytest.mark.slow
def test_likeliest_tokens_equal_a_sort_with_lower_ids_first(interpreted: Arrays) -> None:
    from tests.probes.exact_divergence.interpreted import cases

    for name, (target, behaviour) in cases().items():
        if name == "invalid":
            continue
        for column, k in enumerate(TOP_KS):
            assert interpreted[f"{name}: topk_overlap"][:, column].tolist() == overlap(target, behaviour, k), name
        flips = [a != b for a, b in zip(likeliest(target, 1), likeliest(behaviour, 1), strict=True)]
        assert interpreted[f"{name}: top1_flip"].tolist() == flips, name


@pytest.mark.slow
def test_identical_logits_give_0_and_invalid_logits_nan(interpreted: Arrays) -> None:
    for divergence in ("kl", "reverse_kl", "tv", "chi2", "reverse_chi2"):
        assert (interpreted[f"identical: {divergence}"] == 0.0).all()
        assert np.isnan(interpreted[f"invalid: {divergence}"]).all()


@pytest.mark.slow
def test_kernel_compiles_for_ampere_and_hopper(tmp_path: Path) -> None:
    run(tmp_path, interpret=False)
