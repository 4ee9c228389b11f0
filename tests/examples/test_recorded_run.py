"""Each recorded run is complete, valid and small, and was sampled by the weights beside it."""

import numpy as np
import pytest

from examples.demo.records import COLLAPSED, HEALTHY
from examples.tiny_rl.figures import figures_of_step, table
from examples.tiny_rl.model import load_model, parameter_count
from examples.tiny_rl.record import RECORDED, RECORDED_OF_SGLANG, Manifest, RunRecord
from examples.tiny_rl.task import MAX_RESPONSE_TOKENS, Problem, decode, reward
from examples.tiny_rl.trainer import rloo_advantages
from examples.tiny_rl.verify import rows
from foreshock.digests import weights_digest


@pytest.fixture(
    scope="module",
    params=[RECORDED, RECORDED_OF_SGLANG, HEALTHY, COLLAPSED],
    ids=["vllm", "sglang", "healthy", "collapsed"],
)
def record(request: pytest.FixtureRequest) -> RunRecord:
    return RunRecord(request.param)


@pytest.fixture(scope="module")
def manifest(record: RunRecord) -> Manifest:
    return record.manifest()


def test_every_step_has_valid_rollouts(record: RunRecord, manifest: Manifest) -> None:
    assert record.steps() == list(range(1, manifest.steps + 1)) == sorted(record.scalars())
    for step in record.steps():
        batch = record.rollouts(step)
        assert batch.num_rollouts == manifest.training["prompts"] * manifest.training["responses"]
        assert batch.rollout_log_probs is not None
        assert batch.trainer_log_probs is not None
        assert np.isfinite(batch.rollout_log_probs).all()
        assert np.isfinite(batch.trainer_log_probs).all()
        assert batch.attributes.length_cap == manifest.run.length_cap == MAX_RESPONSE_TOKENS
        assert batch.attributes.trainer_policy == "recomputed_old"


def test_rewards_and_advantages_follow_from_the_tokens(record: RunRecord, manifest: Manifest) -> None:
    for step in record.steps()[::50]:
        batch = record.rollouts(step)
        prompts = rows(batch.prompt_token_ids, batch.prompt_offsets)
        responses = rows(batch.response_token_ids, batch.response_offsets)
        problems = [Problem(tuple(map(int, decode(prompt)[:-1].split("+")))) for prompt in prompts]
        judged = np.array([reward(*each) for each in zip(problems, responses, strict=True)])
        np.testing.assert_array_equal(judged, batch.reward)
        advantages = rloo_advantages(judged.reshape(-1, manifest.training["responses"])).reshape(-1)
        assert batch.advantage is not None
        np.testing.assert_allclose(advantages, batch.advantage, atol=1e-6)


def test_the_scalars_agree_with_the_rollouts(record: RunRecord) -> None:
    scalars = record.scalars()
    for step in record.steps()[::20]:
        figures = figures_of_step(record, step)
        logged = scalars[step]
        assert figures.reward == pytest.approx(logged["reward"], abs=1e-7)
        assert figures.response_length == pytest.approx(logged["response_length"], abs=1e-9)
        assert figures.entropy == pytest.approx(logged["entropy"], rel=1e-6)
        assert figures.k3_kl == pytest.approx(logged["k3"], rel=1e-6)


def test_the_readme_shows_the_figures_of_the_data(record: RunRecord) -> None:
    assert table(record) in (record.folder / "README.md").read_text()


def test_the_checkpoints_are_the_weights_that_sampled_their_steps(record: RunRecord, manifest: Manifest) -> None:
    assert manifest.checkpoints
    for checkpoint in manifest.checkpoints:
        folder = record.folder / checkpoint.path
        assert weights_digest(folder) == checkpoint.digest
        sampled_by = record.rollouts(checkpoint.step).attributes.engine_fingerprint
        assert sampled_by is not None
        assert sampled_by.weights_digest == checkpoint.digest
        assert parameter_count(load_model(folder)) == manifest.parameters < 2_000_000
