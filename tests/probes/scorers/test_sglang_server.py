"""`sglang.http`, `sglang.decode` and the routes on a real SGLang server on a CPU, set up by `scripts/setup_sglang.sh`.

The model is a mixture of experts; `make bench-engines` has a dense one.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks.engines import sample
from examples.tiny_rl.sglang_sampler import SGLANG, running_sglang
from foreshock.digests import weights_digest
from foreshock.doctor import Budget, DoctorReport, examine
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock.scorers import SCORERS
from foreshock_probes.doctor.engines import EngineReplays
from foreshock_probes.doctor.experimenter import TorchExperimenter
from foreshock_probes.offers import imported, load_scorer
from foreshock_probes.routing.recorded import RecordedRoutes, compare_routes
from foreshock_probes.scorers.request import ScoreRequest, UnsupportedScoreError, WarmModel
from tests.probes.replaying import questions_of
from tests.probes.scorers.test_torch_forward import score
from tests.probes.tiny import VOCABULARY, make_rollouts, save_mixture_of_experts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS = 2
PROCESSED = BatchAttributes(logprobs_mode="processed_logprobs", temperature=0.7)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two checkpoints of one mixture of experts: `first` and `second`."""
    root = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("first", "second"), start=1):
        save_mixture_of_experts(root / name, seed, layers=LAYERS)
    return root


@pytest.fixture(scope="module")
def server(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A connection to an SGLang server that was started on the first checkpoint."""
    if not (SGLANG / "sglang").exists() and not os.environ.get("CI"):
        pytest.skip(f"no SGLang in {SGLANG}; run scripts/setup_sglang.sh")
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with running_sglang(checkpoints / "first", log, "--enable-return-routed-experts") as http:
        yield http


@pytest.fixture(autouse=True)
def _settings(server: httpx.Client, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS", f"sglang={server.base_url}")
    yield
    body = {"model_path": str(checkpoints / "first"), "weight_version": "default"}
    server.post("/update_weights_from_disk", json=body).raise_for_status()


@pytest.mark.parametrize("attributes", [None, PROCESSED], ids=["raw", "temperature 0.7"])
def test_decode_gives_the_log_probs_that_the_server_logged(
    server: httpx.Client, checkpoints: Path, attributes: BatchAttributes | None
) -> None:
    """The same bits: SGLang reports log-probs after the temperature, and the replay computes them alike.

    One sequence: how the server batches several depends on when they arrive, and the last bits on that.
    """
    temperature = 1.0 if attributes is None else 0.7
    rollouts = sample(server, [[4, 5, 6, 7]], 60, temperature, attributes=attributes)
    scored = score(checkpoints / "first", rollouts, "sglang.decode")
    assert scored.log_probs.tolist() == np.asarray(rollouts.rollout_log_probs).tolist()
    assert scored.fingerprint.temperature == temperature


@pytest.mark.parametrize("scorer", ["sglang.http", "sglang.decode"])
def test_both_equal_a_forward_pass_in_float32(checkpoints: Path, scorer: str) -> None:
    """The rollouts have the last id of the vocabulary, which SGLang reports as 0."""
    rollouts = make_rollouts(30)
    assert int(rollouts.response_token_ids.max()) == VOCABULARY - 1
    scored = score(checkpoints / "first", rollouts, scorer)
    reference = score(checkpoints / "first", rollouts).log_probs
    np.testing.assert_allclose(scored.log_probs, reference, atol=5e-5)
    fingerprint = scored.fingerprint
    assert (fingerprint.engine, fingerprint.engine_version, fingerprint.dtype) == ("sglang", "0.5.23", "float32")
    assert fingerprint.flags["weights_seen_by"] == "folder"


def test_temperature_is_followed_by_decode_and_refused_by_prefill(checkpoints: Path) -> None:
    rollouts = make_rollouts(10, attributes=PROCESSED)
    scored = score(checkpoints / "first", rollouts, "sglang.decode")
    reference = score(checkpoints / "first", rollouts).log_probs
    np.testing.assert_allclose(scored.log_probs, reference, atol=5e-5)
    with pytest.raises(UnsupportedScoreError, match=r"sglang\.decode follows a temperature"):
        score(checkpoints / "first", rollouts, "sglang.http")


def test_checkpoints_go_through_one_server_that_loads_them(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make_rollouts(10)
    with pytest.raises(UnsupportedScoreError, match="start it on the checkpoint's folder"):
        score(checkpoints / "second", rollouts, "sglang.http")
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS_RELOAD", "sglang")
    seen = []
    for name in ("second", "second", "first"):
        scored = score(checkpoints / name, rollouts, "sglang.http")
        np.testing.assert_allclose(scored.log_probs, score(checkpoints / name, rollouts).log_probs, atol=5e-5)
        seen.append((scored.fingerprint.flags["weights_seen_by"], scored.fingerprint.flags.get("tensors_checksum")))
    assert [how for how, _ in seen] == ["load", "digest", "load"]
    assert seen[0][1] != seen[2][1]


def test_a_context_that_is_too_short_is_refused(checkpoints: Path) -> None:
    rollouts = RolloutBatch.from_lists(["long"], [[1] * 100], [[2] * 60])
    for scorer in ("sglang.http", "sglang.decode"):
        with pytest.raises(UnsupportedScoreError, match="a rollout has 160 tokens, and the server takes less than 123"):
            score(checkpoints / "first", rollouts, scorer)


def test_a_checkpoint_that_cannot_be_loaded_is_refused_with_the_servers_reason(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints / "first" / "config.json").read_bytes())
    monkeypatch.setenv("FORESHOCK_ENGINE_SERVERS_RELOAD", "sglang")
    request = ScoreRequest("sglang.http", "", make_rollouts(2), tmp_path, "sha256:" + 64 * "0")
    with pytest.raises(UnsupportedScoreError, match="answered /update_weights_from_disk with 400"):
        load_scorer("sglang.http")(request, WarmModel(), lambda _: None)


def test_routes_are_those_of_torch_in_float32(checkpoints: Path) -> None:
    rollouts = make_rollouts(30)

    def routes(scorer: str, variant: str = "") -> RecordedRoutes:
        folder = checkpoints / "first"
        request = ScoreRequest(scorer, variant, rollouts, folder, weights_digest(folder))
        recorded: RecordedRoutes = imported(str(SCORERS[scorer].routes))(request, WarmModel(), lambda _: None)
        return recorded

    reference = routes("torch.float32")
    for variant in ("", "rebatched"):
        found = routes("sglang.http", variant)
        assert found.layers == reference.layers == tuple(range(LAYERS))
        measures = compare_routes(rollouts, reference, found, ("torch.float32", "sglang.http")).measures
        assert [each.agreement.mean for each in measures.layers] == [1.0] * LAYERS
        assert (measures.all_tokens.tokens, measures.excluded) == (rollouts.num_tokens, 0)
        assert measures.all_tokens.abs_d.mean < 1e-5


def test_the_doctor_asks_the_server_once_and_reports_its_refusals(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that nothing explains, so that the options are tried, in three sets of rollouts.

    The first are scored; the server holds other weights than those of the second; the third are longer than it takes.
    """
    asked = ("sglang.decode", "sglang.decode:batch_size=4", "sglang.decode:kv_cache_dtype=fp8")
    made = questions_of(monkeypatch)

    def examined(name: str, rollouts: RolloutBatch) -> DoctorReport:
        folder = checkpoints / name
        log_probs = score(folder, rollouts).log_probs
        noise = np.random.default_rng(0).normal(0, 0.3, log_probs.size).astype(np.float32)
        batch = replace(rollouts, rollout_log_probs=np.minimum(log_probs + noise, 0))
        made.clear()
        replays = EngineReplays(batch, folder, tmp_path)
        experimenter = TorchExperimenter.of_folders(batch, folder, folder, [], 1, replays, asked)
        report = examine(batch, experimenter, Budget(most_replays=7))
        assert sorted(made) == sorted(asked)
        assert report.causes == ()
        return report

    def reasons(report: DoctorReport) -> dict[str, str]:
        return {each.variant: each.why for each in report.not_tried}

    long = RolloutBatch.from_lists(["long", "short"], [[1] * 100] * 2, [[2] * 60, [3] * 9])
    scored, elsewhere, too_long = (
        examined(*each) for each in (("first", make_rollouts(10)), ("second", make_rollouts(10)), ("first", long))
    )
    engine, working, refused = f"the engine {asked[0]}", asked[1], f"engine_option: {asked[2]} [rollout]"
    assert f"engine option {working} [rollout]" in {each.variant for each in scored.ruled_out}
    why = reasons(scored)
    assert engine not in why
    assert "set when it is started" in why[refused]
    why = reasons(elsewhere)
    assert "cannot be seen to hold the checkpoint" in why[engine]
    assert why[f"engine_option: {working} [rollout]"] == why[engine]
    assert "a rollout has 160 tokens, and the server takes less than 123" in reasons(too_long)[engine]
