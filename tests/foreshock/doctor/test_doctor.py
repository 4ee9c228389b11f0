"""The doctor names what reproduces the logged log-probs, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from foreshock.api.doctor import DoctorReport, NotTried
from foreshock.doctor import Budget, CannotTryError, Change, examine, report_lines
from foreshock.doctor.evidence import Compared
from foreshock.doctor.sampling import Sampling
from foreshock.rollouts import BatchAttributes, RolloutBatch
from tests.foreshock.doctor.fake import FakeExperimenter, logged, rollouts


def _examined(
    batch: RolloutBatch, mu: NDArray[np.float32], pi: NDArray[np.float32], budget: Budget | None = None
) -> DoctorReport:
    return examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=pi), FakeExperimenter(batch), budget)


@pytest.fixture
def batch() -> RolloutBatch:
    return rollouts()


@pytest.fixture
def lab(batch: RolloutBatch) -> FakeExperimenter:
    return FakeExperimenter(batch)


def test_two_precisions_of_the_same_weights_are_expected_rounding(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    report = _examined(batch, logged(lab), logged(lab, precision="float32"))
    assert [each.kind for each in report.findings] == ["expected"]
    assert report.findings[0].cause == "rounding"
    assert {each.side: each.precision for each in report.sides} == {"rollout": "bfloat16", "trainer": "float32"}


def test_rounding_of_an_unknown_kernel_is_no_cause(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    noise = np.random.default_rng(5).normal(0, 0.012, batch.num_tokens).astype(np.float32)
    report = _examined(batch, logged(lab) + noise, logged(lab, precision="autocast"))
    assert report.causes == ()


@pytest.mark.parametrize("decoding", [0.008, 0.002])
def test_forward_pass_is_searched_only_beyond_what_decoding_differs_by(batch: RolloutBatch, decoding: float) -> None:
    """An engine that decodes logs what a decode by torch gives; what is farther away may be a fault."""
    lab = FakeExperimenter(batch)
    lab.sizes_of_compositions["decode"] = 0.006
    values = logged(lab, composition="decode")
    lab.sizes_of_compositions["decode"] = decoding
    lab.made.clear()
    report = examine(replace(batch, rollout_log_probs=values), lab)
    assert report.causes == ()
    why = {each.variant: each.why for each in report.not_tried}
    is_left = why.get("forward [rollout]") == "what is left is no more than what decoding token by token differs by"
    assert is_left == (decoding == 0.008)
    assert any(change.get("positions") for change in lab.made) != is_left


@pytest.mark.parametrize("has_fault", [True, False])
def test_ids_that_the_rounding_of_decoding_hides_are_named_in_a_decode(batch: RolloutBatch, has_fault: bool) -> None:
    lab = FakeExperimenter(batch)
    lab.sizes_of_compositions["decode"] = 0.03
    sampling = Sampling(biases=((5, -0.2),)) if has_fault else Sampling()
    decoded = Change.of(weights="step_10", precision="bfloat16", composition="decode")
    compared = Compared.of(batch, np.zeros(batch.num_tokens, np.float32))
    values = sampling.log_probs(lab.logits(decoded), compared).astype(np.float32)
    report = examine(replace(batch, rollout_log_probs=values), lab)
    assert [each.cause for each in report.causes] == ["token_bias"] * has_fault


def test_older_weights_of_the_engine_are_named_on_its_side(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    report = _examined(batch, logged(lab, weights="step_7"), logged(lab))
    assert [(each.side, each.cause, each.value) for each in report.causes] == [("rollout", "other_weights", "step_7")]
    assert report.causes[0].share > 0.99
    assert "step_7" in "\n".join(report_lines(report))


def test_weights_that_both_sides_hold_are_no_lag(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    logged_batch = replace(
        batch,
        rollout_log_probs=logged(lab, weights="step_7"),
        trainer_log_probs=logged(lab, weights="step_7", precision="autocast"),
    )
    lab.subject = replace(lab.subject, announced={"rollout": "step_10", "trainer": "step_7"})
    report = examine(logged_batch, lab)
    assert [(each.kind, each.cause, each.value) for each in report.findings] == [("cause", "other_weights", "step_7")]


def test_a_lag_that_the_rollouts_declare_is_expected(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    declared = replace(batch, weights_version=np.full(batch.num_tokens, 7, np.int32))
    report = _examined(declared, logged(lab, weights="step_7"), logged(lab))
    assert report.causes == ()
    assert "a lag, not a fault" in report.findings[0].sentence


def test_older_weights_in_some_rollouts_are_named_with_these(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    rows = np.repeat(np.arange(batch.num_rollouts), batch.response_lengths)
    mixed = np.where(rows % 3 == 0, logged(lab, weights="step_7"), logged(lab))
    finding = _examined(batch, mixed, logged(lab)).causes[0]
    assert (finding.cause, finding.rollouts) == ("other_weights", 11)
    assert finding.sample_ids[:3] == ("r0", "r3", "r6")


def test_older_weights_of_all_rollouts_are_no_mixture_with_those_that_fit_some_by_chance(batch: RolloutBatch) -> None:
    lab = FakeExperimenter(batch, ("step_10", "step_7", "step_4"))
    plain = lab.logits

    def logits(change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """The update from step 4 to step 7 was small."""
        if rows or change.get("weights") != "step_4":
            return plain(change, rows)
        newer = plain(change.plus(Change.of(weights="step_7")))
        return np.asarray(newer + np.float32(0.01) * (plain(change) - newer))

    lab.logits = logits  # type: ignore[method-assign]
    noise = np.random.default_rng(4).normal(0, 0.02, batch.num_tokens).astype(np.float32)
    mu = np.minimum(logged(lab, weights="step_7") + noise, 0)
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(lab)), lab)
    assert [(each.cause, each.value, each.rollouts) for each in report.causes] == [("other_weights", "step_7", 32)]


def test_a_temperature_is_fitted_and_named_on_the_side_that_has_it(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    report = _examined(batch, logged(lab, temperature=0.8), logged(lab))
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "temperature")]
    assert float(report.causes[0].value) == pytest.approx(0.8, abs=0.01)


def test_a_repetition_penalty_of_the_response_alone_is_named(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    plain = Compared.of(batch, logged(lab))
    logits = lab.logits(Change.of(weights="step_10", precision="bfloat16"))
    mu = Sampling(repetition_of_response=1.2).log_probs(logits, plain).astype(np.float32)
    report = _examined(batch, mu, logged(lab))
    assert [(each.side, each.cause, each.value) for each in report.causes] == [("rollout", "repetition_penalty", "1.2")]
    assert "1.2 ± " in report.causes[0].sentence
    assert "the ids of the response only" in report.causes[0].sentence


def test_tokens_of_truncated_sampling_with_raw_log_probs_are_named(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    logits = lab.logits(Change.of(weights="step_10", precision="bfloat16"))
    kept = np.where(logits < np.sort(logits, axis=1)[:, -3:-2], -np.inf, logits)
    noise = np.random.default_rng(5).gumbel(size=logits.shape)
    batch.response_token_ids[:] = np.argmax(kept + noise, axis=1)
    report = _examined(batch, logged(lab), logged(lab, precision="autocast"))
    assert [(each.side, each.cause, each.value) for each in report.causes] == [("rollout", "top_k", "3")]
    assert "are raw" in report.causes[0].sentence


def test_what_an_engine_refuses_is_not_tried_in_its_own_words(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    asked = ("vllm.decode", "vllm.decode:kv_cache_dtype=fp8")
    lab.subject = replace(lab.subject, engines=asked)
    mu = logged(lab, positions="zero")
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(lab)), lab)
    refused = {each.variant: each.why for each in report.not_tried if "refused" in each.why}
    assert refused == {
        "the engine vllm.decode": "vllm.decode is refused",
        "engine_option: vllm.decode:kv_cache_dtype=fp8 [rollout]": "vllm.decode:kv_cache_dtype=fp8 is refused",
    }
    assert [each.cause for each in report.causes] == ["positions"]


def test_a_trainer_without_the_declared_temperature_is_named(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    declared = replace(batch, attributes=BatchAttributes(temperature=0.8, logprobs_mode="processed_logprobs"))
    report = _examined(declared, logged(lab, temperature=0.8), logged(lab))
    assert [(each.side, each.cause) for each in report.causes] == [("trainer", "temperature")]
    assert "does not apply it" in report.causes[0].sentence


def test_a_fault_that_hides_the_precision_is_named_in_it(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    lab.size_of_positions = 0.06
    pi = logged(lab, positions="zero", precision="bfloat16")
    report = examine(replace(batch, trainer_log_probs=pi), lab)
    assert [(each.side, each.cause) for each in report.causes] == [("trainer", "positions")]
    assert [each.precision for each in report.sides] == ["bfloat16"]
    assert report.causes[0].share > 0.99


def test_a_rounding_that_hides_the_precision_is_named_in_it(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    """In another precision many tokens are rounded to the next step, which leaves as much as without the rounding."""
    pi = np.round(logged(lab, precision="float32"), 1)
    report = examine(replace(batch, trainer_log_probs=pi), lab)
    assert [(each.cause, each.value) for each in report.causes] == [("decimals", "1")]
    assert [each.precision for each in report.sides] == ["float32"]


def test_a_fault_of_few_prompts_is_named(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    """The others, which the change leaves as they were, say nothing of it."""
    plain, few = lab.logits, np.repeat(np.arange(32) < 8, batch.response_lengths)[:, None]  # two of eight prompts

    def logits(change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        if rows or not change.get("positions"):
            return plain(change, rows)
        return np.where(few, plain(change), plain(Change.of(**{**dict(change.values), "positions": None})))

    lab.logits = logits  # type: ignore[method-assign]
    pi = logged(lab, positions="zero", precision="autocast")
    report = examine(replace(batch, trainer_log_probs=pi), lab)
    assert [(each.side, each.cause) for each in report.causes] == [("trainer", "positions")]


def test_each_side_has_its_own_cause(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    report = _examined(batch, logged(lab, temperature=0.7), logged(lab, positions="zero"))
    assert {(each.side, each.cause) for each in report.causes} == {("rollout", "temperature"), ("trainer", "positions")}


def test_two_causes_of_one_side_are_separated(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    mu = logged(lab, positions="restart")
    mu[::5] = -9999.0
    report = _examined(batch, mu, logged(lab))
    assert {each.cause for each in report.causes} == {"sentinels", "positions"}


def test_a_small_second_cause_is_found_in_rollouts_without_another(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    lab.size_of_positions = 0.3
    mu = logged(lab, positions="restart")
    marked = np.repeat(np.arange(batch.num_rollouts) < 20, batch.response_lengths)
    mu[marked & (np.arange(mu.size) % 2 == 0)] = 0
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(lab)), lab)
    assert {each.cause for each in report.causes} == {"zeros", "positions"}


def test_a_clamp_that_most_tokens_reach_is_no_sentinel(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    report = _examined(batch, np.maximum(logged(lab), np.float32(-1.0)), logged(lab))
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "clamp")]


def test_the_bias_of_one_id_is_not_called_one_of_all_ids() -> None:
    batch = rollouts(number=256)
    lab = FakeExperimenter(batch)
    logits = lab.logits(Change.of(weights="step_10", precision="autocast")).astype(np.float64)
    logits[:, 5] += 3.0
    ids = np.arange(logits.shape[0]), batch.response_token_ids
    mu = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[ids].astype(np.float32)
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(lab)), lab)
    (cause,) = report.causes
    assert (cause.cause, cause.value) == ("token_bias", "id 5 +3.00")


def test_numbers_that_are_quantised_on_the_way_have_a_rounding_of_their_own(batch: RolloutBatch) -> None:
    lab = FakeExperimenter(batch)
    lab.quantises = True
    mu = logged(lab, precision="autocast", quantise="fp8_channel", activations="fp8_channel")
    mu = np.minimum(mu + np.random.default_rng(0).normal(0, 0.1, mu.size), 0).astype(np.float32)
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(lab)), lab)
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "quantised_activations")]


def test_running_sums_have_the_rounding_of_their_tokens(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    # Kernels that no replay has, with less rounding than that between two precisions.
    mu = logged(lab) + np.random.default_rng(0).normal(0, 0.02, batch.num_tokens)
    starts = np.repeat(batch.response_offsets[:-1], batch.response_lengths)
    running = np.cumsum(mu)
    report = _examined(batch, (running - (running - mu)[starts]).astype(np.float32), logged(lab))
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "cumulative")]


def test_one_value_a_rollout_is_no_sentinel(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    pi = logged(lab, precision="float32").astype(np.float64)
    sums = np.add.reduceat(pi, batch.response_offsets[:-1]).astype(np.float32)
    report = _examined(batch, logged(lab), np.repeat(sums, batch.response_lengths))
    assert [(each.side, each.cause) for each in report.causes] == [("trainer", "averaged")]


def test_a_shift_is_named_without_any_replay_of_its_own(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    plain = logged(lab)
    report = _examined(batch, plain, np.concatenate([plain[1:], plain[:1]]))
    assert [(each.side, each.cause, each.value) for each in report.causes] == [("trainer", "shift", "the token after")]
    assert report.replays <= 8


@pytest.mark.parametrize("size", [0.3, 1.0])
def test_a_fault_that_no_variant_reproduces_is_unknown(batch: RolloutBatch, lab: FakeExperimenter, size: float) -> None:
    noise = np.random.default_rng(3).normal(0, size, batch.num_tokens).astype(np.float32)
    report = _examined(batch, np.minimum(logged(lab) + noise, 0), logged(lab))
    assert report.causes == ()
    assert [(each.kind, each.side) for each in report.findings] == [("unknown", "rollout")]
    assert report.ruled_out
    assert NotTried("kv_cache: fp8 with scale 1 [rollout]", "the fake has no such change") in report.not_tried


def test_a_cause_that_noise_hides_is_not_called_ruled_out(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    """The engine samples at a temperature of 1.04 and its log has noise beside: neither alone reproduces it."""
    noise = np.random.default_rng(3).normal(0, 0.04, batch.num_tokens).astype(np.float32)
    report = _examined(batch, np.minimum(logged(lab, temperature=1.04) + noise, 0), logged(lab))
    assert report.causes == ()
    text = "\n".join(report_lines(report))
    assert "tried and not named: " in text
    assert "ruled out" not in text
    # The trainer's side is reproduced, so that its forward pass is not searched; the engine's was.
    sides = {"[rollout]", "[trainer]"}
    variants = [*(each.variant for each in report.ruled_out), *(each.variant for each in report.not_tried)]
    assert all(sides & set(each.split()) for each in variants)
    assert "not tried: forward [trainer]: the side is reproduced as exactly as other batches" in text


def test_a_copied_column_is_named_and_only_the_engine_is_explained(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    report = _examined(batch, logged(lab), logged(lab))
    assert [each.cause for each in report.findings] == ["bypass"]
    assert [each.side for each in report.sides] == ["rollout"]


def test_equal_log_probs_of_a_collapsed_policy_are_no_copy(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    plain = lab.logits

    def certain(change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        found = plain(change, rows)
        ids = np.arange(found.shape[0]), (batch.select(np.array(rows)) if rows else batch).response_token_ids
        found[ids] = 25.0
        return found

    lab.logits = certain  # type: ignore[method-assign]
    equal = logged(lab)
    report = examine(replace(batch, rollout_log_probs=equal, trainer_log_probs=equal), lab)
    assert [(each.kind, each.cause) for each in report.findings] == [("expected", "rounding")]
    assert [each.side for each in report.sides] == ["rollout", "trainer"]


class _SlowExperimenter(FakeExperimenter):
    """Each new replay takes a second for each rollout, in parts of a tenth."""

    def __init__(self, batch: RolloutBatch) -> None:
        super().__init__(batch)
        self.seconds = 0.0
        self._known: dict[tuple[Change, tuple[int, ...]], NDArray[np.float32]] = {}

    def logits(self, change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        if (change, rows) not in self._known:
            for _ in range(10 * len(rows or range(self.batch.num_rollouts))):
                self.check()
                self.seconds += 0.1
            self._known[change, rows] = FakeExperimenter(self.batch).logits(change, rows)
        return self._known[change, rows]


@pytest.mark.parametrize(
    ("seconds", "left"), [(90.0, "everything [rollout]"), (90.0, "positions [trainer]"), (230.0, "positions [rollout]")]
)
def test_a_budget_is_kept_within_a_replay_and_what_it_left_out_is_reported(
    batch: RolloutBatch, lab: FakeExperimenter, seconds: float, left: str
) -> None:
    noise = np.random.default_rng(3).normal(0, 0.3, batch.num_tokens).astype(np.float32)
    sides = replace(batch, rollout_log_probs=np.minimum(logged(lab) + noise, 0), trainer_log_probs=logged(lab) + noise)
    slow = _SlowExperimenter(batch)
    report = examine(sides, slow, Budget(seconds=seconds, clock=lambda: slow.seconds))
    assert seconds <= slow.seconds < seconds + 1
    assert NotTried(left, "the budget is spent") in report.not_tried
    assert report.ended.startswith("the budget is spent; with more, the next would be ")
    assert report.causes == ()


def test_what_differs_between_two_replayed_sides_is_named_though_the_budget_ends_in_the_first_search(
    batch: RolloutBatch, lab: FakeExperimenter
) -> None:
    noise = np.random.default_rng(3).normal(0, 0.03, batch.num_tokens).astype(np.float32)
    declared = replace(batch, attributes=replace(batch.attributes, temperature=0.7, logprobs_mode="processed_logprobs"))
    mine = np.minimum(logged(lab, temperature=0.7) + noise, 0.0)
    sides = replace(declared, rollout_log_probs=mine, trainer_log_probs=logged(lab, temperature=1.0))
    slow = _SlowExperimenter(batch)
    report = examine(sides, slow, Budget(seconds=80.0, clock=lambda: slow.seconds))
    assert [(each.side, each.cause) for each in report.causes] == [("trainer", "temperature")]
    assert report.ended.startswith("the budget is spent")


def test_a_side_that_was_not_examined_is_not_called_rounding(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    slow = _SlowExperimenter(batch)
    slow.subject = replace(slow.subject, announced={"rollout": "step_10", "trainer": "step_7"})
    sides = replace(batch, rollout_log_probs=logged(lab), trainer_log_probs=logged(lab, temperature=0.5))
    report = examine(sides, slow, Budget(seconds=55.0, clock=lambda: slow.seconds))
    assert NotTried("everything [trainer]", "the budget is spent") in report.not_tried
    (unknown,) = (each for each in report.findings if each.side == "trainer")
    assert unknown.kind == "unknown"
    assert "were not examined: the budget was spent before" in unknown.sentence
    assert all(each.cause != "rounding" for each in report.findings)


def test_a_budget_that_ends_before_the_floors_are_known_is_refused(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    slow = _SlowExperimenter(batch)
    budget = Budget(seconds=40.0, clock=lambda: slow.seconds)
    with pytest.raises(CannotTryError, match="budget of 40 s was spent on the first replays of the announced weights"):
        examine(replace(batch, rollout_log_probs=logged(lab, temperature=0.8)), slow, budget)


def test_rollouts_without_log_probs_are_refused(batch: RolloutBatch, lab: FakeExperimenter) -> None:
    with pytest.raises(CannotTryError, match="neither rollout_log_probs nor"):
        examine(batch, lab)


@pytest.fixture
def unsteady(lab: FakeExperimenter) -> FakeExperimenter:
    """A model of which rounding changes every 40th token by several nats."""
    plain = lab.logits

    def logits(change: Change, rows: tuple[int, ...] = ()) -> NDArray[np.float32]:
        found = plain(change, rows)
        if not rows and change.get("precision") == "float32":
            found[::40] += 3 * np.random.default_rng(1).normal(size=found[::40].shape).astype(np.float32)
        return found

    lab.logits = logits  # type: ignore[method-assign]
    return lab


def test_tokens_that_rounding_decides_hide_no_cause_at_others(batch: RolloutBatch, unsteady: FakeExperimenter) -> None:
    mu = logged(unsteady, temperature=0.85)
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(unsteady)), unsteady)
    assert [(each.side, each.cause) for each in report.causes] == [("rollout", "temperature")]
    side = next(each for each in report.sides if each.side == "rollout")
    assert side.before < side.rounding


def test_tokens_that_rounding_decides_hide_no_unknown_fault(batch: RolloutBatch, unsteady: FakeExperimenter) -> None:
    noise = np.random.default_rng(3).normal(0, 0.2, batch.num_tokens).astype(np.float32)
    mu = np.minimum(logged(unsteady) + noise, 0)
    report = examine(replace(batch, rollout_log_probs=mu, trainer_log_probs=logged(unsteady)), unsteady)
    assert [(each.kind, each.side) for each in report.findings] == [("unknown", "rollout")]
    side = next(each for each in report.sides if each.side == "rollout")
    assert side.before < side.rounding
