"""An exact pair in real engines: its values against distributions that the test computes itself, in float64."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from foreshock.digests import weights_digest
from foreshock.fingerprint import Fingerprint
from foreshock.measures.exact import measure_exact
from foreshock.rollouts import BatchAttributes, RolloutBatch, decode_scores
from foreshock.scorers import EXACT_PAIRS
from foreshock_probes.engines.process import run_tasks
from foreshock_probes.exact_divergence.pairs import run_part
from foreshock_probes.job_scoring import EXACT_PART
from foreshock_probes.scorers.forward_pass import load_model
from foreshock_probes.scorers.request import ScoreRequest, ScoreTask, UnsupportedScoreError, WarmModel, read_arrays
from foreshock_probes.scorers.vllm_engine import BYTES_PER_LOGIT
from tests.probes.replaying import Asked
from tests.probes.tiny import VOCABULARY, make_rollouts, plain_logits, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

Float64 = NDArray[np.float64]
Values = Mapping[str, NDArray[Any]]
Chosen = Mapping[str, Mapping[str, Any]]
(PAIR,) = EXACT_PAIRS.values()
# The engine in float32, so that the test's own float32 forward pass has its distributions up to rounding. 20 tokens per
# step, so that some prompts come in two chunks.
FLOAT32_ENGINE: Chosen = {PAIR.behaviour: {"dtype": "float32", "logits_bytes": 20 * BYTES_PER_LOGIT * VOCABULARY}}


@dataclass(frozen=True, slots=True)
class Case:
    """A pair that is compared, and how."""

    rollouts: RolloutBatch
    options: Chosen
    weights: Path


class Found:
    """The results of some cases: one process of torch, then one of vLLM for each of their weights."""

    def __init__(self, cases: Mapping[str, Case], folder: Path) -> None:
        self.exact: dict[str, Values] = {}
        self.fingerprints: dict[tuple[str, str], Fingerprint] = {}
        self.scores: dict[tuple[str, str], NDArray[np.float32]] = {}
        tasks: dict[tuple[str, str, bool], ScoreTask] = {}
        for scorer in (PAIR.target, PAIR.behaviour):
            for name, case in cases.items():
                asked = Asked(case.rollouts, case.weights, scorer, options=dict(case.options.get(scorer, {})))
                arguments = {"pair": PAIR.key, "states": str(folder / f"{name}.states")}
                tasks[name, scorer, True] = asked.task(
                    folder, f"{name}-{scorer}", function=EXACT_PART, arguments=arguments
                )
                if name == "bfloat16":
                    tasks[name, scorer, False] = asked.task(folder, f"scores-{scorer}")
        results = run_tasks(list(tasks.values()), self._read, folder).results
        for (name, scorer, is_pair), result in zip(tasks, results, strict=True):
            if not is_pair:
                self.scores[name, scorer] = result
                continue
            self.exact[name], self.fingerprints[name, scorer] = result

    def _read(self, task: ScoreTask) -> Any:
        if task.function is None:
            return decode_scores(task.result.read_bytes()).log_probs
        return read_arrays(task.result)


def batch_of_kinds() -> RolloutBatch:
    """Return rollouts of several temperatures, two without a prompt and one without a response."""
    random = np.random.default_rng(7)
    prompts = [random.integers(0, VOCABULARY, size).tolist() for size in (3, 0, 5, 1, 0)]
    responses = [random.integers(0, VOCABULARY, size).tolist() for size in (9, 6, 0, 12, 1)]
    return RolloutBatch.from_lists(
        list("abcde"), prompts, responses, attributes=BatchAttributes(logprobs_mode="processed_logprobs"),
        temperature=np.array([1.0, 0.7, 1.0, 1.5, 0.7], dtype=np.float32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("exact") / "weights", seed=5)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> dict[str, Case]:
    rollouts = make_rollouts(24, seed=3)
    in_float32 = {"autocast": None, "master_dtype": "float32"}
    return {
        # One row a batch, as the test's own forward passes: bfloat16 products depend on the padding.
        "bfloat16": Case(rollouts, {**FLOAT32_ENGINE, PAIR.target: {"batch_size": 1}}, weights),
        "kinds": Case(
            batch_of_kinds(),
            {**FLOAT32_ENGINE, PAIR.target: {**in_float32, "padding": "left", "temperature": 1.25}},
            weights,
        ),
        "float32": Case(rollouts, {**FLOAT32_ENGINE, PAIR.target: in_float32}, weights),
        "sampled": Case(sampled_rollouts(weights, count=400, length=20), FLOAT32_ENGINE, weights),
        "broken": Case(make_rollouts(6, seed=3), FLOAT32_ENGINE, broken(weights, tmp_path_factory.mktemp("broken"))),
    }


@pytest.fixture(scope="module")
def one_pair(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The first case alone, for `make test`: it needs one start of vLLM."""
    return Found({"bfloat16": cases["bfloat16"]}, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def found(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found({name: case for name, case in cases.items() if name != "bfloat16"}, tmp_path_factory.mktemp("pairs"))


def broken(weights: Path, folder: Path) -> Path:
    """Return a copy of the weights with a head that has a NaN."""
    from safetensors.torch import load_file

    (folder / "config.json").write_bytes((weights / "config.json").read_bytes())
    tensors = load_file(weights / "model.safetensors")
    tensors["lm_head.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def own_log_probs(weights: Path, rollouts: RolloutBatch, divisor: Float64, autocast: torch.dtype | None) -> Float64:
    """Return log-probs over the vocabulary [T, V] of the test's own forward passes, row by row; NaN without a state."""
    model = load_model(weights, torch.float32, "sdpa", torch.device("cpu"))
    of_tokens = torch.from_numpy(np.repeat(divisor, rollouts.response_lengths))[:, None]
    found: Float64 = torch.log_softmax(plain_logits(model, rollouts, autocast) / of_tokens, -1).numpy()
    return found


def check_against(exact: Values, target: Float64, behaviour: Float64, chosen: NDArray[np.int32]) -> None:
    """Compare divergences with the sums of the definitions; the two sides know μ up to the rounding of float32."""
    pi, mu, rows = np.exp(target), np.exp(behaviour), np.arange(chosen.size)
    expected = {
        "kl": (mu * (behaviour - target)).sum(1), "reverse_kl": (pi * (target - behaviour)).sum(1),
        "tv": 0.5 * np.abs(pi - mu).sum(1), "target_entropy": -(pi * target).sum(1),
        "behaviour_entropy": -(mu * behaviour).sum(1), "target_log_probs": target[rows, chosen],
        "behaviour_log_probs": behaviour[rows, chosen],
    }  # fmt: skip
    assert np.nanmean(expected["kl"]) > 1e-6
    for name, values in expected.items():
        found = exact[name].astype(np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(values), err_msg=name)
        np.testing.assert_allclose(found, values, rtol=0.02, atol=2e-5 if "kl" not in name else 2e-7, err_msg=name)
    known = ~np.isnan(expected["kl"])
    flips = target[known].argmax(1) != behaviour[known].argmax(1)
    np.testing.assert_array_equal(exact["top1_flip"][known], flips)


def test_divergences_equal_the_definitions_and_log_probs_the_scorers(one_pair: Found, cases: dict[str, Case]) -> None:
    rollouts, weights = cases["bfloat16"].rollouts, cases["bfloat16"].weights
    exact = one_pair.exact["bfloat16"]
    ones = np.ones(rollouts.num_rollouts)
    target, behaviour = (own_log_probs(weights, rollouts, ones, each) for each in (torch.bfloat16, None))
    check_against(exact, target, behaviour, rollouts.response_token_ids)
    # The scores are computed after the comparison, which leaves nothing behind in the engines.
    np.testing.assert_allclose(exact["target_log_probs"], one_pair.scores["bfloat16", PAIR.target], atol=2e-6)
    np.testing.assert_allclose(exact["behaviour_log_probs"], one_pair.scores["bfloat16", PAIR.behaviour], atol=2e-5)
    target_made, made = (one_pair.fingerprints["bfloat16", scorer] for scorer in (PAIR.target, PAIR.behaviour))
    assert (target_made.autocast, made.dtype, made.batch_composition) == ("bfloat16", "float32", "1 rows in order")


def test_temperatures_padding_on_the_left_and_rollouts_without_a_prompt(found: Found, cases: dict[str, Case]) -> None:
    rollouts, weights = cases["kinds"].rollouts, cases["kinds"].weights
    assert rollouts.temperature is not None
    exact = found.exact["kinds"]
    target = own_log_probs(weights, rollouts, np.full(5, 1.25), None)
    behaviour = own_log_probs(weights, rollouts, rollouts.temperature.astype(np.float64), None)
    check_against(exact, target, behaviour, rollouts.response_token_ids)
    assert int(np.isnan(exact["kl"]).sum()) == 2


def test_equal_precision_is_float32_rounding(found: Found, cases: dict[str, Case]) -> None:
    measured = measure_exact(found.exact["float32"], cases["float32"].rollouts.response_offsets)
    assert measured.kl.mean < 1e-10
    assert measured.top1_flip.mean == 0.0


def test_sampled_estimates_agree_with_the_exact_kl(found: Found) -> None:
    exact = found.exact["sampled"]
    d = exact["target_log_probs"].astype(np.float64) - exact["behaviour_log_probs"]
    kl = exact["kl"].astype(np.float64)
    for estimate in (-d, np.expm1(d) - d):
        # Means over rollouts, because the states of one are dependent.
        excess = (estimate - kl).reshape(400, 20).mean(1)
        assert abs(excess.mean()) < 4 * excess.std(ddof=1) / np.sqrt(400)
    measured = measure_exact(exact, np.arange(401) * 20, group_ids=[f"prompt-{row // 8}" for row in range(400)])
    assert measured.k3_kl.low < measured.kl.mean < measured.k3_kl.high
    assert measured.k3_kl.high - measured.k3_kl.low < measured.kl.mean
    assert measured.kl.high - measured.kl.low < measured.k3_kl.high - measured.k3_kl.low


def test_weights_that_are_not_numbers_give_states_that_are_not_finite(found: Found, cases: dict[str, Case]) -> None:
    exact = found.exact["broken"]
    measured = measure_exact(exact, cases["broken"].rollouts.response_offsets)
    assert (measured.tokens, measured.non_finite) == (0, cases["broken"].rollouts.num_tokens)
    assert np.isnan(exact["kl"]).all()
    assert not np.nan_to_num(exact["top1_flip"]).any()


def sampled_rollouts(weights: Path, count: int, length: int) -> RolloutBatch:
    """Return rollouts that the model samples in float32, whose distributions are the engine's in float32."""
    model = load_model(weights, torch.float32, "sdpa", torch.device("cpu"))
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (count, 4), generator=random)
    with torch.no_grad():
        for _ in range(length):
            probabilities = torch.softmax(model(input_ids=ids, use_cache=False).logits[:, -1].double(), -1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=random)], 1)
    names = [f"sampled-{row}" for row in range(count)]
    return RolloutBatch.from_lists(names, ids[:, :4].tolist(), ids[:, 4:].tolist())


@pytest.mark.parametrize(
    ("scorer", "options", "message"),
    [
        (PAIR.behaviour, {"tensor_parallel_size": 2}, "tensor_parallel_size=1"),
        (PAIR.behaviour, {"dtype": "float8"}, "dtype"),
        (PAIR.target, {"autocast": "float8"}, "autocast"),
        (PAIR.target, {"tp_size": 2}, "tp_size=1"),
    ],
)
def test_settings_that_a_pair_cannot_have_are_refused(
    weights: Path, tmp_path: Path, scorer: str, options: dict[str, Any], message: str
) -> None:
    states = tmp_path / "states.safetensors"
    if scorer == PAIR.behaviour:
        save_file({name: torch.ones(1, 1) for name in ("divisor", "weight", "softcap", "hidden")}, states)
    own: dict[str, Any] = {"options": options, "arguments": {"pair": PAIR.key, "states": str(states)}}
    request = ScoreRequest(scorer, "", make_rollouts(3), weights, weights_digest(weights), **own)
    with pytest.raises(UnsupportedScoreError, match=message):
        run_part(request, WarmModel(), lambda done: None)
