"""Every check of the lint: its name, what it is called, what a finding does to the measures, and what to do.

The order is that of reading: what makes all other numbers meaningless comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHECKS", "Check"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `title` says what is wrong where it warns, `looks_for` how it is seen."""

    name: str
    title: str
    looks_for: str
    effect: str
    remedy: str


_ALL = (
    Check(
        "probabilities_as_log_probs",
        "probabilities were logged instead of log-probs",
        "all values of a column lie between 0 and 1",
        "Every measure is meaningless: differences of probabilities are read as differences of their logarithms.",
        "Log the natural logarithm: drop the exp(), or take np.log of what was logged.",
    ),
    Check(
        "negated_log_probs",
        "log-probs were logged with the wrong sign",
        "no value of a column is below 0, and some are above 1",
        "Every measure is meaningless: likely tokens are taken for unlikely ones, and ρ for 1/ρ where both have it.",
        "Log log-probs and not the loss (negative log-likelihood): multiply by −1.",
    ),
    Check(
        "positive_log_probs",
        "some log-probs are above 0: probabilities beyond 1",
        "single values above 0 by more than rounding",
        "The service refuses such rollouts; ρ of these tokens has no meaning.",
        "Look for logits or unnormalised scores among the log-probs, and for a log-softmax taken in a short type.",
    ),
    Check(
        "non_finite_log_probs",
        "some log-probs are NaN or infinite",
        "NaN, −inf or +inf at tokens that the model generated",
        "These tokens are left out of every mean, which hides whatever made them so.",
        "−inf of the trainer: it truncates (top-p, top-k) where the engine did not. −inf or NaN of the engine: it was "
        "asked about tokens that it did not sample, or overflowed. NaN as padding belongs under the response mask.",
    ),
    Check(
        "identical_log_probs",
        "the two log-probs are the same numbers",
        "log π equals log μ in every bit, at uncertain tokens too, in all rollouts or in some",
        "Every trainer-side measure is 0 whatever the mismatch is: it is not seen, not absent.",
        "Where old_log_probs are set to rollout_log_probs (bypass), log the trainer's own recomputed ones for this, at "
        "least every few steps. Only a trainer made to agree with its engine bit for bit may ignore this.",
    ),
    Check(
        "wrong_log_base",
        "one of the log-probs is no natural logarithm",
        "log π is log μ times the factor between two bases, at likely and at unlikely tokens",
        "Every measure is meaningless: d grows with how unlikely a token is.",
        "Multiply log2 values by ln 2 = 0.693, log10 values by ln 10 = 2.303.",
    ),
    Check(
        "raw_log_probs",
        "the logged μ is not the law that sampled (raw log-probs under temperature or truncation)",
        "−log μ of the sampled tokens does not average to the entropy of μ, or sampling parameters and logprobs mode "
        "say so",
        "Every ratio looks perfect or is biased: KL, χ² and ESS are those of a policy that sampled nothing.",
        "Have the engine log what it sampled from (vLLM: logprobs_mode=processed_logprobs), apply the same temperature "
        "in the trainer, or sample at temperature 1 without truncation. Also look whether `entropy` is that of the "
        "same distribution as log μ.",
    ),
    Check(
        "entropy_of_trainer",
        "`entropy` is that of π and not of μ",
        "−log μ does not average to the entropy, and −log π weighted by ρ does",
        "surprisal_z and the maps by entropy are of the wrong distribution; everything else stands.",
        "Log the engine's entropy, or none.",
    ),
    Check(
        "temperature_of_trainer",
        "the trainer does not apply the temperature that sampled",
        "temperature and processed_logprobs are declared, and log π grows with log μ as if at temperature 1",
        "d is the difference of two temperatures: k3 and every weight measure that, and no mismatch.",
        "Divide the trainer's logits by the sampling temperature before the log-softmax.",
    ),
    Check(
        "processed_log_probs",
        "μ was truncated and π was not (processed log-probs)",
        "mean ρ below 1 with d nearly always below 0, or tokens that are certain under μ and not under π",
        "E ρ is the kept mass, not 1: k3 is KL − (1 − E ρ), and ESS, χ² and every weight leave out what was cut.",
        "Sample without truncation, or apply the same top-p, top-k and min-p to the trainer's distribution.",
    ),
    Check(
        "mean_ratio",
        "the mean of ρ is not 1",
        "the token mean of ρ is off 1 by more than 2 % and far beyond its clustered error",
        "E_μ[ρ] = 1 whenever the logged μ sampled the tokens and covers π: k3, χ² and every weight are biased by this.",
        "Check what each side applies: temperature (a trainer that divides its logits, an engine that logged raw "
        "ones), truncation, the weights' version, dropout left on in the trainer. Below 1 it may also be a heavy tail "
        "that the sample missed: see pareto_k.",
    ),
    Check(
        "shifted_log_probs",
        "the two log-probs are shifted by one token",
        "log π fits its neighbour's log μ at least twice as well as its own, in most rollouts",
        "Every measure compares different tokens: k3 is orders of magnitude too large.",
        "Log-probs of logits[:, :-1] belong to tokens[:, 1:]: look where prompt and response are cut apart.",
    ),
    Check(
        "pad_id_sampled",
        "a token id that the model sampled is dropped by the trainer (a pad id inside a response)",
        "at one token id, and always there, log π is 0, NaN or −inf, or the mask is 0, while log μ is real",
        "Few tokens, large harm: each has an enormous |d|, and what follows it is scored in another context.",
        "Make masks from lengths and not from `id != pad`; keep ids that pad out of the sampled vocabulary.",
    ),
    Check(
        "tokens_without_engine",
        "the engine has no log-prob for tokens that the trainer scored",
        "log μ is exactly 0 where log π says that the token was uncertain: at ends or at first tokens",
        "ρ is as small as these tokens are unlikely: mean ρ falls below 1 and k3 is large, as if μ had been truncated.",
        "Padding and prompt tokens belong under the response mask; have the engine log the end-of-sequence token too.",
    ),
    Check(
        "tokens_without_trainer",
        "the trainer has no log-prob for tokens that were sampled",
        "log π is exactly 0 at many ids where log μ says the token was uncertain",
        "d = −log μ there, of any size: ρ and χ² explode.",
        "Look for responses cut at a length, or padded rows: log NaN where there is no value, or mask the tokens.",
    ),
    Check(
        "masked_values",
        "masked tokens carry values",
        "response_mask 0 with a log μ or an advantage other than 0",
        "The mask and the values disagree on who made these tokens: if the model did, measures leave tokens out; if it "
        "did not, an advantage on them trains on tool output.",
        "Mask exactly what the model did not sample, and set log μ and advantages to 0 there. (log π and entropy at "
        "masked tokens are normal: a forward pass scores all tokens.)",
    ),
    Check(
        "duplicated_rollouts",
        "rollouts are there more than once",
        "more responses of one prompt with the same tokens and the same bits of log μ than chance explains",
        "Counts and lengths are too high, intervals too narrow: the copies bring no information.",
        "Log before batches are padded to a multiple by repeating rollouts, and log each rollout from one rank. If "
        "sampling was sharper than log μ says (a low temperature), declare it: then this check does not apply.",
    ),
    Check(
        "rounded_log_probs",
        "log-probs were rounded to a shorter type",
        "every value of a column, or of some rollouts, fits into bfloat16 or float16",
        "Rounding makes a mismatch of its own, the larger the less likely the token.",
        "Compute the log-softmax in float32 and keep it so up to where it is logged.",
    ),
)

CHECKS: dict[str, Check] = {check.name: check for check in _ALL}
