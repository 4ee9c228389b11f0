"""The report of the lint: the catalogue of its checks, the outcome of each, warnings with their evidence.

The report has the order of the catalogue: findings that make all other numbers meaningless come first.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foreshock.api.steps import CheckRecord, LintExampleRecord, LintWarningRecord
from foreshock.severity import Severity


@dataclass(frozen=True, slots=True, order=True)
class Example:
    """One place of a warning: a rollout, optionally a token (counted from 0), and the values there."""

    sample_id: str
    token: int = -1  # −1: the rollout as a whole
    text: str = ""

    def record(self) -> LintExampleRecord:
        """Return the record to show."""
        token = self.token if self.token >= 0 else None
        return LintExampleRecord(sample_id=self.sample_id, token=token, text=self.text)


@dataclass(frozen=True, slots=True)
class LintReport:
    """All checks over `rollouts` rollouts and `tokens` model-generated tokens; critical warnings first."""

    rollouts: int
    tokens: int
    warnings: tuple[LintWarningRecord, ...] = ()
    checks: tuple[CheckRecord, ...] = field(default=())

    @property
    def is_clean(self) -> bool:
        """True if no check found more than an info; checks that could not be made are in `not_checked`."""
        return all(warning.severity == "info" for warning in self.warnings)

    @property
    def not_checked(self) -> tuple[CheckRecord, ...]:
        """The checks that could not be made, with the reasons."""
        return tuple(check for check in self.checks if check.state == "not checked")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "warnings": [
                {**asdict(warning), "where": [_place(example) for example in warning.where]}
                for warning in self.warnings
            ],
            "checks": [asdict(check) for check in self.checks],
        }


def _place(example: LintExampleRecord) -> dict[str, Any]:
    return {**asdict(example), "token": -1 if example.token is None else example.token}


# The chance of a false alarm of one statistical check at a healthy step. Four checks over 1000 steps: 0.4 %.
FALSE_ALARM = 1e-6
# With fewer groups Student's t has no power at such small chances.
LEAST_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """The check found a problem: `seen` in one sentence with its numbers, `evidence` by name.

    `title` replaces the title of the check if the finding names the affected part of the data.
    """

    check: str
    severity: Severity
    seen: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    where: tuple[Example, ...] | None = None  # None: the examples under the check's own name
    title: str = ""


@dataclass(frozen=True, slots=True)
class Clean:
    """The check found nothing; `why` gives the reason if it is not the data."""

    check: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class NotChecked:
    """The check could not be made, because of `why`."""

    check: str
    why: str


Outcome = Finding | Clean | NotChecked


def format_number(value: float) -> str:
    """Return three significant digits, plain or scientific, with U+2212 as the minus sign."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "not estimable"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")


def format_percent(part: float, whole: float) -> str:
    """Return `part` of `whole` as a percentage; 0 % if `whole` is 0."""
    return f"{format_number(100.0 * part / whole)} %" if whole else "0 %"


def format_signed_percent(share: float) -> str:
    """Return a share as a percentage with its sign."""
    return f"{'+' if share > 0 else '−'}{format_number(100.0 * abs(share))} %"


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `title` names the problem that it finds; `docs/lint.md` describes how it is found."""

    name: str
    title: str
    effect: str
    remedy: str
    # False: the data do not prove it; other causes look the same.
    proven: bool = True
    # False: it names nothing that makes π and μ differ, so that it is never the cause of a mismatch.
    explains: bool = True


_ALL = (
    Check(
        "probabilities_as_log_probs",
        "probabilities were logged instead of log-probs",
        "Every measure is meaningless: differences of probabilities are read as differences of their logarithms.",
        "Log the natural logarithm: remove the exp(), or apply np.log to the logged values.",
    ),
    Check(
        "negated_log_probs",
        "log-probs were logged with the opposite sign",
        "Every measure is meaningless: likely tokens count as unlikely ones, and ρ as 1/ρ if both columns are negated.",
        "Log log-probs and not the loss (negative log-likelihood): multiply by −1.",
    ),
    Check(
        "positive_log_probs",
        "some log-probs are slightly above 0: rounded logits",
        "ρ of these tokens is off by as much as their log-probs were rounded.",
        "Compute the log-softmax in float32 from float32 logits.",
    ),
    Check(
        "placeholder_log_probs",
        "some values in the place of log-probs are placeholders",
        "These tokens are left out of every mean; they are counted, and all others are measured.",
        "−9999 and the like: the engine or the mask wrote it for −inf or for a missing value; let it log the value, or "
        "NaN. Tokens that the model did not sample (tool output, padding): set the response mask to 0 there.",
    ),
    Check(
        "non_finite_log_probs",
        "some log-probs are NaN or infinite",
        "These tokens are left out of every mean, so the measures do not show their cause.",
        "−inf of the trainer: it truncates (top-p, top-k) and the engine does not. −inf or NaN of the engine: it "
        "scored tokens that it did not sample, or it overflowed. NaN of padding: set the response mask to 0 there.",
    ),
    Check(
        "identical_log_probs",
        "the two log-probs are the same numbers",
        "Every trainer-side measure is 0, whatever the mismatch is.",
        "If old_log_probs are set to rollout_log_probs (bypass), log the trainer's own recomputed ones at least every "
        "few steps. Ignore this only if the trainer is built to agree with its engine bit for bit.",
    ),
    Check(
        "wrong_log_base",
        "one of the two log-probs is not a natural logarithm",
        "Every measure is meaningless: d grows with how unlikely a token is.",
        "Multiply log2 values by ln 2 = 0.693, log10 values by ln 10 = 2.303.",
    ),
    Check(
        "raw_log_probs",
        "the logged μ is not the sampling distribution (raw log-probs under temperature or truncation)",
        "Every ratio looks perfect or is biased: KL, χ² and ESS are those of a policy that did not sample the tokens.",
        "Let the engine log the sampling distribution (vLLM: logprobs_mode=processed_logprobs) and apply the same "
        "temperature in the trainer, or sample at temperature 1 without truncation. Also check that `entropy` is that "
        "of the same distribution as log μ.",
    ),
    Check(
        "entropy_of_trainer",
        "`entropy` is that of π and not of μ",
        "surprisal_z and the maps by entropy are of another distribution; all other measures are valid.",
        "Log the engine's entropy, or none.",
        explains=False,
    ),
    Check(
        "temperature_of_trainer",
        "the trainer does not apply the sampling temperature",
        "d is the difference between two temperatures: k3 and every weight measure that, and not the mismatch.",
        "Divide the trainer's logits by the sampling temperature before the log-softmax.",
        proven=False,
    ),
    Check(
        "temperatures_differ",
        "it looks as if the two log-probs had different temperatures",
        "d is mostly the difference between two temperatures, and so are k3 and every weight.",
        "Declare the engine's temperature, top_p and logprobs_mode (batch attributes) and log its entropy, so that the "
        "lint can tell. Compare with the temperature that the trainer divides its logits by.",
        proven=False,
    ),
    Check(
        "k3_per_entropy",
        "k3 is too large for the entropy",
        "k3 alone is in its healthy range because the policy is nearly certain; per nat of entropy it is beyond.",
        "Find the cause as for a large k3: replay a step with a checkpoint (`foreshock probe`), and check the other "
        "findings. A low entropy makes any mismatch look small.",
        proven=False,
        explains=False,
    ),
    Check(
        "processed_log_probs",
        "μ was truncated and π was not (processed log-probs)",
        "E ρ is the mass that truncation kept and not 1: k3 is KL − (1 − E ρ), and ESS, χ² and every weight leave out "
        "the tokens that were cut off.",
        "Sample without truncation, or apply the same top-p, top-k and min-p to the trainer's distribution.",
    ),
    Check(
        "mean_ratio",
        "the mean of ρ is not 1",
        "E_μ[ρ] = 1 if the logged μ sampled the tokens and covers π: k3, χ² and every weight are biased by the "
        "difference.",
        "Compare what the two sides apply: temperature (the trainer divides its logits, the engine logs raw ones), "
        "truncation, weights version, dropout left on in the trainer. A mean below 1 may also be a heavy tail that the "
        "sample missed: see pareto_k.",
        proven=False,
        explains=False,
    ),
    Check(
        "shifted_log_probs",
        "the two log-probs are shifted by one token",
        "Every measure compares different tokens: k3 is orders of magnitude too large.",
        "Log-probs of logits[:, :-1] belong to tokens[:, 1:]: check the code that splits prompt and response.",
    ),
    Check(
        "pad_id_sampled",
        "one token id that the model sampled has no log π, or mask 0",
        "Few tokens have a large effect: each has a very large |d|, and the tokens after it are scored in another "
        "context.",
        "Make masks from lengths and not from `id != pad`, with the end of sequence inside; remove padding ids from "
        "the sampled vocabulary.",
    ),
    Check(
        "mismatch_after_id",
        "the mismatch begins at one token id, which the model sampled (a padding id that the trainer's mask drops)",
        "k3, χ² and their tails are mostly those of the tokens after this id, which the trainer scores in another "
        "context.",
        "Make attention masks and positions from lengths and not from `id != pad`; remove padding ids from the sampled "
        "vocabulary.",
    ),
    Check(
        "mismatch_by_place",
        "the mismatch is concentrated in one part of the tokens",
        "Means over all tokens hide it: most of the tokens are as they should be, and few are far off.",
        "Look at what differs there. The place does not name the cause: `foreshock doctor` with the step's weights "
        "tries what could make it.",
    ),
    Check(
        "mismatch_everywhere",
        "the mismatch is alike at all positions",
        "k3 is what it is, and no single place, shift or temperature makes it.",
        "Let the trainer score one batch twice: with dropout the two passes differ. `foreshock doctor` with the "
        "weights of this step and of earlier ones tells numerics (a quantised engine) from weights of another step.",
        proven=False,
        explains=False,
    ),
    Check(
        "tokens_without_engine",
        "the engine has no log-prob for tokens that the trainer scored",
        "ρ of these tokens is as small as they are unlikely: mean ρ falls below 1 and k3 is large, as if μ had been "
        "truncated.",
        "Let the engine return a log-prob for every token that it samples, the end of sequence too; set the response "
        "mask to 0 for padding, tool output and prompt tokens.",
    ),
    Check(
        "tokens_without_trainer",
        "the trainer has no log-prob for tokens that were sampled",
        "d = −log μ at these tokens, of any size: ρ and χ² become very large.",
        "Check for responses cut at a length and for padded rows: log NaN for a missing value, or mask the tokens.",
    ),
    Check(
        "masked_values",
        "masked tokens carry values",
        "Mask and values contradict each other: if the model sampled these tokens, the measures leave them out; if it "
        "did not, an advantage trains on tool output.",
        "Mask exactly the tokens that the model did not sample, and set log μ and advantages to 0 there. (log π and "
        "entropy at masked tokens are normal: a forward pass scores all tokens.)",
        explains=False,
    ),
    Check(
        "duplicated_rollouts",
        "rollouts are logged more than once",
        "Counts and lengths are too high and intervals too narrow: a copy adds no information.",
        "Log before batches are padded to a multiple by repeating rollouts, and log each rollout from one rank. If "
        "sampling was sharper than log μ shows (a low temperature), declare it: then this check does not apply.",
        explains=False,
    ),
    Check(
        "clipped_before_update",
        "the mismatch alone puts tokens outside the clip range",
        "If the trainer's ratio is taken against log μ, PPO drops the gradient of these tokens at equal weights.",
        "Take PPO's ratio against recomputed log-probs, and correct the mismatch by an importance weight of its own.",
        explains=False,
    ),
    Check(
        "sampling_not_declared",
        "it cannot be told if the logged μ sampled the tokens",
        "If log μ is taken before temperature or truncation, every ratio looks perfect.",
        "Declare temperature, top_p, top_k and logprobs_mode (batch attributes), or log the engine's entropy.",
    ),
    Check(
        "lag_unknown",
        "the lag is unknown",
        "All tokens are judged as if engine and trainer held the same weights: staleness looks like numerics.",
        "Declare trainer_weights_version (batch attributes): the version of the weights that computed log π.",
        explains=False,
    ),
    Check(
        "no_reward_spread",
        "no group has a spread of rewards",
        "Advantages relative to the group are 0: the step teaches nothing. The mismatch is measured as usual.",
        "Check the reward function and the group ids; filter prompts that are always or never solved.",
        explains=False,
    ),
    Check(
        "empty_responses",
        "responses are empty",
        "They have no token to measure, and lower the mean length.",
        "Look at what the engine returned for these prompts: an end of sequence at once, or a failed request.",
        explains=False,
    ),
    Check(
        "all_truncated",
        "every response was cut off at a length limit",
        "Lengths are those of the limit, and rewards those of unfinished answers.",
        "Raise the limit, or check that the end of sequence is among the stop ids.",
        explains=False,
    ),
    Check(
        "rounded_log_probs",
        "log-probs were rounded to a shorter type",
        "Rounding adds a mismatch of its own, which is larger for less likely tokens.",
        "Compute the log-softmax in float32 and keep float32 until it is logged.",
    ),
)

CHECKS: dict[str, Check] = {check.name: check for check in _ALL}


def title_of_part(check: str) -> str:
    """Return the title of a finding that concerns only some of the rollouts."""
    return f"{CHECKS[check].title} in a part of the rollouts"
