"""Tokens with one log-prob missing, by token id, and masked tokens that carry values.

A model may sample its padding id like any other token. A trainer that makes its mask from `id != pad` drops that token.
Such an id shows in the data: every occurrence of it is affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from foreshock.lint.constants import constant_of_masked
from foreshock.lint.counting import NO_MU_VALUES, NO_PI_VALUES, EvidenceBuilder, KeyedSums
from foreshock.lint.report import Clean, Example, Finding, NotChecked, Outcome, format_number
from foreshock.lint.sampling import GREEDY
from foreshock.lint.values import example_at
from foreshock.measures.inputs import truncated_rollouts
from foreshock.rollouts.batch import RolloutBatch
from foreshock.rollouts.schema import are_log_probs

if TYPE_CHECKING:
    from foreshock.lint.evidence import LintEvidence


# A log μ below this belongs to an uncertain token, whose log π cannot be 0, even if the trainer sharpens.
_REAL = -0.5
_IDS_KEPT = 256

Places = NDArray[np.int64]


class MissingByTokenId(KeyedSums):
    """Missing log-probs by token id, of at most 256 ids.

    `without_target` counts generated tokens with a real log μ and no log π (0, NaN, −inf or a constant); `masked`
    counts masked tokens with a log μ; `sampled` counts all tokens of the id that have a real log μ, or are masked with
    a log μ.
    """

    __slots__ = ()
    COUNTS = ("without_target", "masked", "sampled")

    def merge(self, other: Self) -> Self:
        """Return the sum of both tables."""
        return KeyedSums.merge(self, other).cut()

    def cut(self) -> Self:
        """Return the table of the 256 ids with the most missing log-probs."""
        order = np.lexsort((self.keys, -(self.counts[:, 0] + self.counts[:, 1])))
        return self if self.keys.size <= _IDS_KEPT else self.rows(np.sort(order[:_IDS_KEPT]))


def count_masked_values(batch: RolloutBatch, builder: EvidenceBuilder) -> NDArray[np.float32]:
    """Count masked tokens with a log-prob, an entropy or an advantage other than 0; return their constant log μ."""
    constants: dict[str, NDArray[np.float32]] = {}
    masked = _masked(batch)
    if masked.size == 0:
        return np.zeros(0, np.float32)
    columns = {"rollout": batch.rollout_log_probs, "trainer": batch.trainer_log_probs, "entropy": batch.entropy}
    if batch.advantage_per_token:
        columns["advantage"] = batch.advantage
    for name, values in columns.items():
        if values is None:
            continue
        at_masked = values[masked]
        carried = masked[_carries(at_masked) if name != "advantage" else np.isfinite(at_masked) & (at_masked != 0)]
        if name in ("rollout", "trainer"):
            constants[name] = constant_of_masked(at_masked)
            constant = np.isin(values[carried], constants[name])
            placeholders = int((np.isfinite(at_masked) & ~are_log_probs(at_masked)).sum() + constant.sum())
            builder.count(masked_placeholders=placeholders)
            carried = carried[~constant]
        carried = _outside_overlong(batch, carried)
        builder.count(**{f"masked_{name}": carried.size})
        if name in ("rollout", "advantage"):
            for place in carried[:2].tolist():
                what = f"{name} log-prob" if name == "rollout" else name
                builder.add_example("masked_values", example_at(batch, place, f"{what} {values[place]:.4g}, mask 0"))
    return constants.get("rollout", np.zeros(0, np.float32))


def missing_by_token_id(
    batch: RolloutBatch, builder: EvidenceBuilder, masked_constant: NDArray[np.float32]
) -> MissingByTokenId:
    """Return the token ids without log-probs at tokens that the model sampled, judging by log μ."""
    behaviour = batch.rollout_log_probs
    if behaviour is None:
        return MissingByTokenId.empty()
    target = batch.trainer_log_probs
    constants = builder.constants["trainer"]
    masked = _masked(batch)
    without_target = np.zeros(0, np.int64)
    if target is not None:
        # Generated tokens whose log π is 0, NaN, −inf or a constant.
        missing = ~((target > -np.inf) & (target != 0)) & batch.generated
        if constants.size:
            missing |= np.isin(target, constants) & batch.generated
        without_target = np.flatnonzero(missing)
        without_target = without_target[_is_real(behaviour[without_target])]
        for value in constants.tolist():
            builder.add_example(NO_PI_VALUES, Example(format_number(value)))
    # At a masked token any log μ other than 0 and the constant counts.
    constant = np.isin(behaviour[masked], masked_constant)
    masked = _outside_overlong(batch, masked[_carries(behaviour[masked]) & ~constant])
    if without_target.size == 0 and masked.size == 0:
        return MissingByTokenId.empty()
    ids = np.union1d(batch.response_token_ids[without_target], batch.response_token_ids[masked])
    counts = np.zeros((ids.size, 3), np.int64)
    of_these_ids = np.flatnonzero(np.isin(batch.response_token_ids, ids))
    sampled = of_these_ids[_is_real(behaviour[of_these_ids]) | np.isin(of_these_ids, masked, assume_unique=True)]
    builder.count(
        missing_first=int(np.isin(without_target, batch.response_offsets[:-1]).sum()),
        missing_last=int(np.isin(without_target, batch.response_offsets[1:] - 1).sum()),
        dropped_first=int(np.isin(masked, batch.response_offsets[:-1]).sum()),
        dropped_last=int(np.isin(masked, batch.response_offsets[1:] - 1).sum()),
    )
    for column, places in enumerate((without_target, masked, sampled)):
        slots = np.searchsorted(ids, batch.response_token_ids[places])
        counts[:, column] = np.bincount(slots, minlength=ids.size)
        # Keep examples of the id with the most missing log-probs.
        for place in places[slots == counts[:, column].argmax()][:3].tolist() if column < 2 else ():
            builder.add_example("pad_id_sampled", _example(batch, place, ("no log π", "mask 0")[column]))
    for place in without_target[:3].tolist():
        builder.add_example("tokens_without_trainer", _example(batch, place, "no log π"))
    return MissingByTokenId.of(ids.astype(np.int64), counts).cut()


def _masked(batch: RolloutBatch) -> Places:
    return np.zeros(0, np.int64) if batch.response_mask is None else np.flatnonzero(batch.response_mask == 0)


def _outside_overlong(batch: RolloutBatch, masked: Places) -> Places:
    """Return the masked places without those of truncated responses that are masked as a whole.

    Overlong filtering (DAPO) masks these to keep them out of the loss. The model sampled them, so they may have values.
    """
    if not masked.size:
        return masked
    overlong = truncated_rollouts(batch)[0] & (batch.generated_lengths == 0)
    rows = np.searchsorted(batch.response_offsets, masked, side="right") - 1
    return np.asarray(masked[~overlong[rows]])


def _is_real(behaviour: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(are_log_probs(behaviour) & (behaviour < np.float32(_REAL)))


def _carries(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(are_log_probs(values) & (values != 0))


def _example(batch: RolloutBatch, place: int, what: str) -> Example:
    assert batch.rollout_log_probs is not None
    text = f"id {batch.response_token_ids[place]}, log μ {batch.rollout_log_probs[place]:.4g}, {what}"
    return example_at(batch, place, text)


# This share counts as all: of the tokens of an id, and of all tokens without the log-prob.
_NEARLY_ALL = 0.9
# NaN and −inf have other causes too: fewer at one id are no evidence against the id.
_LEAST_NON_FINITE = 3
_LEAST_WITHOUT_ENGINE = 4
# Mean log π is above this at tokens that μ is certain of, and below it at tokens that the engine did not score.
_CERTAIN_LOG_PI = -0.2
# Tokens that truncation or a low temperature makes certain have a mean log π above this.
_UNSAMPLED_LOG_PI = -1.6
# If more than this share of all tokens are the first (or last) of their response, the position is no evidence.
_MOST_AT_A_PLACE = 0.6
_NO_MU = "needs rollout_log_probs"


def check_missing_trainer(evidence: LintEvidence) -> tuple[Outcome, Outcome]:
    """Check for a sampled token id that the trainer drops, and for sampled tokens of many ids without a log π."""
    one, many = "pad_id_sampled", "tokens_without_trainer"
    if not evidence.count("rollout_logged"):
        return NotChecked(one, _NO_MU), NotChecked(many, _NO_MU)
    ids, counts = evidence.missing.keys, evidence.missing.counts
    missing, masked = (int(counts[:, column].sum()) for column in (0, 1))
    no_target = not evidence.count("trainer_logged")
    rest: Outcome = NotChecked(many, "needs trainer_log_probs") if no_target else Clean(many)
    constants = [each.sample_id for each in evidence.where(NO_PI_VALUES)]
    no_log_pi = f"no log π ({', '.join(['0', *constants, 'NaN'])} or −inf)"
    for column, total, what in ((0, missing, no_log_pi), (1, masked, "mask 0")):
        if not total:
            continue
        slot = int(counts[:, column].argmax())
        affected, sampled = int(counts[slot, column]), int(counts[slot, 2])
        if column == 0:
            sampled -= int(counts[slot, 1])
        non_finite = column == 0 and missing <= evidence.count("trainer_nan") + evidence.count("trainer_minus_inf")
        if non_finite and affected < _LEAST_NON_FINITE:
            continue
        if affected >= _NEARLY_ALL * total and affected >= _NEARLY_ALL * sampled:
            token_id, others = int(ids[slot]), total - affected
            place = _place(evidence, "missing" if column == 0 else "dropped", total)
            place += " (or the mask is shifted by one token)" if column == 1 and place else ""
            seen = (
                f"{affected:,} of {sampled:,} tokens of id {token_id} with a real log μ have {what}{place}; {others:,} "
                "tokens of other ids do."
            )
            numbers = {"token_id": float(token_id), "sampled": sampled, "dropped": affected}
            where = tuple(each for each in evidence.where(one) if each.text.startswith(f"id {token_id},"))
            return Finding(one, "critical", seen, {**numbers, "dropped_of_others": others}, where), rest
    # NaN and −inf have a check of their own.
    zeros = missing - evidence.count("trainer_nan") - evidence.count("trainer_minus_inf")
    if zeros > 0:
        seen = (
            f"{zeros:,} tokens of {ids.size:,} ids have log π = {' or '.join(constants or ['0'])} while log μ is below "
            f"−0.5{_place(evidence, 'missing', missing)}."
        )
        rest = Finding(many, "critical", seen, {"tokens": zeros, "token_ids": ids.size})
    return Clean(one), rest


def check_missing_engine(evidence: LintEvidence) -> Outcome:
    """Check for tokens that the engine did not score (log μ = 0): padding, ends, or a prompt's last token."""
    check = "tokens_without_engine"
    missing = evidence.count("no_mu")
    if not evidence.count("paired"):
        return NotChecked(check, "needs rollout_log_probs and trainer_log_probs")
    if missing < _LEAST_WITHOUT_ENGINE or evidence.sum("no_mu_log_pi") > _CERTAIN_LOG_PI * missing:
        return Clean(check)
    place = _place(evidence, "no_mu", missing)
    trailing = evidence.count("no_mu_trailing")
    if trailing >= _NEARLY_ALL * missing and evidence.count("no_mu_last") < _NEARLY_ALL * missing:
        place = ", in runs up to the end of their response: padding, or log-probs that the engine did not return"
    in_runs = evidence.count("no_mu_beside") >= _NEARLY_ALL * missing
    unlikely = evidence.sum("no_mu_log_pi") <= _UNSAMPLED_LOG_PI * missing
    uncertain = unlikely and not -evidence.extreme("minus_min_temperature") < GREEDY
    if not place and in_runs and uncertain:
        place = ", in runs: tokens that the model did not sample, such as tool output"
    values = [each.sample_id for each in evidence.where(NO_MU_VALUES)] or ["0"]
    if not place and values == ["0"]:
        if not uncertain:
            return Clean(check)
        place = ", here and there: the engine returned no log-probs for them, as with accepted draft tokens"
    mean_log_pi = format_number(evidence.sum("no_mu_log_pi") / missing)
    rest = evidence.count("paired") - missing
    without = format_number((evidence.sum("paired_k3") - evidence.sum("no_mu_k3")) / rest) if rest else "not known"
    seen = (
        f"{missing:,} tokens have log μ = {' or '.join(values)} exactly, and a mean log π of {mean_log_pi}{place}. "
        f"Without them k3 is {without}."
    )
    numbers = {name: evidence.count(name) for name in ("no_mu", "no_mu_first", "no_mu_last", "no_mu_trailing")}
    return Finding(check, "critical", seen, numbers)


def check_masked_values(evidence: LintEvidence, pad_id: Outcome) -> Outcome:
    """Check for masked tokens with a log μ or an advantage; those of a `pad_id` finding are not counted again."""
    check = "masked_values"
    masked = evidence.count("tool_tokens")
    if not masked:
        return Clean(check, "no token is masked")
    numbers = {name: evidence.count(f"masked_{name}") for name in ("rollout", "advantage", "trainer", "entropy")}
    if isinstance(pad_id, Finding) and numbers["rollout"] <= int(evidence.missing.counts[:, 1].sum()):
        numbers["rollout"] = 0
    if not (numbers["rollout"] or numbers["advantage"]):
        return Clean(check)
    values = {"rollout": "a log μ", "advantage": "an advantage", "trainer": "a log π", "entropy": "an entropy"}
    counted = ", ".join(f"{numbers[name]:,} have {value}" for name, value in values.items() if numbers[name])
    return Finding(
        check, "warning", f"Of {masked:,} masked tokens, {counted} other than 0.", {"masked": masked, **numbers}
    )


def _place(evidence: LintEvidence, counted: str, total: int) -> str:
    """Return a clause if nearly all the tokens are the last, or the first, of their responses; else an empty string."""
    if evidence.count("rollouts") > _MOST_AT_A_PLACE * evidence.count("tokens"):
        return ""
    if evidence.count(f"{counted}_last") >= _NEARLY_ALL * total:
        return ", each the last token of its response: the end of sequence"
    if evidence.count(f"{counted}_first") >= _NEARLY_ALL * total:
        return ", each the first token of its response: the prompt's last token, or one cut too early"
    return ""
