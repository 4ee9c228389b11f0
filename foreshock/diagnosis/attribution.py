"""All conclusions on the attribution of a step, the most important first: links, precision, exact divergences.

A link is most of the mismatch if the lower end of its share's interval is above one half. If its share is above one
half and the interval's lower end is not, the conclusion says how many more prompts would probably do.

An exact divergence states a size and names no cause: it compares two replays with the same weights, which is one link
of the chain and not the whole.
"""

import math
from collections.abc import Sequence

from foreshock.api.attribution import AttributionDocument, ExactOfLinkRecord, LinkRecord, SideBranchRecord
from foreshock.api.replays import MeanRecord
from foreshock.diagnosis.conclusion import Conclusion, marked_links
from foreshock.diagnosis.environments import conclude_environments
from foreshock.diagnosis.wording import interval_of_share, interval_text, number, percent, plural
from foreshock.fingerprint import ADAPTER_FLAG, MERGED_ADAPTER, Fingerprint
from foreshock.interval_names import range_in_words
from foreshock.measures.estimators.bootstrap import LEAST_CLUSTERS
from foreshock.scorers import ENGINE_REPLAY, TRAINER_REPLAY

MAJORITY = 0.5
MUCH_CANCELLATION = 1.2
"""Σ E[d_link²]/E[d²] above which links are reported to cancel; independent links have 1."""

# A larger estimate only means that there is far too little data.
_MOST_PROMPTS = 1_000_000


def conclude_adapters(document: AttributionDocument) -> list[Conclusion]:
    """Return the links whose replay rounded a LoRA adapter merged with its base model, because it loads no adapters."""
    merged = {
        score.scorer
        for score in document.scores
        if Fingerprint.from_dict(score.fingerprint).flags.get(ADAPTER_FLAG) == MERGED_ADAPTER
        and score.fingerprint.get("dtype") != "float32"
    }
    return [
        Conclusion(
            "adapter-merged",
            f"{' and '.join(ends)} scored the base model with the LoRA adapter merged, whose rounding gives other "
            f"weights than were served. It is part of {link.name}{_share_of(link)}, so no cause is named for it; use a "
            f"scorer that loads adapters, such as {ENGINE_REPLAY} or {TRAINER_REPLAY}.",
            link.name,
        )
        for link in document.links
        if link.rms_d > 0 and (ends := [name for name in link.name.split("/") if name in merged])
    ]


def _share_of(link: LinkRecord) -> str:
    return f" ({percent(link.share)} of the mismatch)" if math.isfinite(link.share) else ""


def conclude_links(document: AttributionDocument, so_far: Sequence[Conclusion]) -> list[Conclusion]:
    """Return the cause of most of the mismatch, or why none can be named."""
    if document.whole.rms_d == 0:
        ends = f"{document.chain[0]} and {document.chain[-1]}"
        return [Conclusion("no-difference", f"{ends} do not differ at any token.", document.whole.name)]
    known = sorted((link for link in document.links if math.isfinite(link.share)), key=lambda link: -link.share)
    if not known:
        return []
    of_the_request = links_of_wrong_precision(document)
    unnamed = marked_links(so_far) | of_the_request
    found = [] if known[0].name in unnamed else [_on_the_largest(document, known)]
    if document.cancellation > MUCH_CANCELLATION and not of_the_request:
        words = f"the sum of their E[d²] is {number(document.cancellation)} times that of the whole"
        found.append(Conclusion("cancellation", f"Links cancel each other in part: {words}."))
    return found


def prompts_needed(link: LinkRecord, prompt_groups: int) -> int | None:
    """Return how many prompts would put the lower end of the link's share above one half.

    The estimate assumes that the share stays the same and that the distance to the lower end falls with the square root
    of the number of prompts. None if the share is not above one half or its interval is unknown.
    """
    reach, beyond = link.share - link.share_low, link.share - MAJORITY
    if not (beyond > 0 and reach > 0) or prompt_groups < 1:
        return None
    return math.ceil(prompt_groups * (reach / beyond) ** 2)


def _on_the_largest(document: AttributionDocument, known: Sequence[LinkRecord]) -> Conclusion:
    largest = known[0]
    interval = interval_of_share(largest.share_low, largest.share_high)
    if largest.share_low > MAJORITY:
        part = f"Most of the mismatch, {percent(largest.share)} ({interval}),"
        if percent(largest.share_low) == percent(1.0):
            part = "All of the mismatch"
        return Conclusion(
            "cause",
            f"{part} is in one link, {largest.cause}.",
            largest.name,
            names_cause=True,
        )
    if largest.share_high <= MAJORITY:
        shares = ", ".join(
            f"{percent(link.share)} ({interval_of_share(link.share_low, link.share_high)}) {link.short_cause}"
            for link in known
        )
        return Conclusion("no-majority", f"No single link is most of the mismatch: {shares}.")
    return Conclusion("cannot-tell", _cannot_tell(document, known), largest.name)


def _cannot_tell(document: AttributionDocument, known: Sequence[LinkRecord]) -> str:
    largest = known[0]
    others = f" from {known[1].short_cause}" if len(known) > 1 else ""
    asked = f"{plural(document.rollouts, 'rollout')} of {plural(document.groups, 'prompt')}"
    words = f"Cannot tell {largest.short_cause}{others} with {asked}"
    shares = (
        f"the largest share is {percent(largest.share)}, {interval_of_share(largest.share_low, largest.share_high)}"
    )
    return f"{words}: {shares}; {_more_prompts(document, largest)}."


def _more_prompts(document: AttributionDocument, largest: LinkRecord) -> str:
    needed = prompts_needed(largest, document.groups)
    if needed is None:
        return "more prompts are needed" if math.isnan(largest.share_low) else "more prompts would narrow the intervals"
    more = max(needed - document.groups, 1)
    if more > _MOST_PROMPTS:
        return "the shares are too equal to be told apart by more prompts"
    return f"about {plural(more, 'more prompt')} would do (an estimate, if the share stays as it is)"


FLOAT32_ROUNDING = 1e-9
"""The k3 in nats below which two float32 forward passes count as equal: an rms difference of 4.5e-5. Other batch
compositions change a float32 pass by 1e-14 to 1e-12, a bfloat16 pass differs from it by 1e-5 or more."""

_LOGGED, _REPLAYED = "trainer", TRAINER_REPLAY


def conclude_precision(document: AttributionDocument) -> list[Conclusion]:
    """Return the conclusions from the side branch; none if the reference was not scored."""
    reference = document.side_branch
    if reference is None:
        return []
    if not _trainer_is_float32(document, reference):
        return _nearer(reference)
    declared = document.declared_precision
    as_declared = ""
    if declared is not None:
        agrees = declared == "float32"
        as_declared = ", as its fingerprint declares" if agrees else f", though its fingerprint declares {declared}"
    sentence = (
        f"The trainer computes in float32{as_declared}: {reference.reference} reproduces its log-probs (k3 "
        f"{number(reference.k3_of(_LOGGED))}), and {_REPLAYED} as requested does not (k3 "
        f"{number(reference.k3_of(_REPLAYED))}). Request the probe again with {_REPLAYED} in float32 (autocast none, "
        "master_dtype float32)."
    )
    return [Conclusion("trainer-precision", sentence, f"{reference.reference}/{_LOGGED}", names_cause=True)]


def links_of_wrong_precision(document: AttributionDocument) -> frozenset[str]:
    """Return the links that end in a replay of the trainer in a precision that is not the trainer's.

    Their shares are due to the request of the probe; none of them is named a cause.
    """
    reference = document.side_branch
    if reference is None or not _trainer_is_float32(document, reference):
        return frozenset()
    return frozenset(link.name for link in document.links if _REPLAYED in link.name.split("/"))


def _trainer_is_float32(document: AttributionDocument, reference: SideBranchRecord) -> bool:
    """Return whether the reference equals the logged trainer within rounding and the replayed trainer does not."""
    floor = _noise_floor(document, reference.reference)
    equal = FLOAT32_ROUNDING if math.isnan(floor) else max(FLOAT32_ROUNDING, floor)
    return reference.k3_of(_LOGGED) <= equal < reference.k3_of(_REPLAYED)


def _noise_floor(document: AttributionDocument, scorer: str) -> float:
    """Return the k3 of a scorer against itself in other batches; NaN if unknown."""
    return next((floor.k3_kl for floor in document.floors if floor.scorer == scorer), math.nan)


def _nearer(reference: SideBranchRecord) -> list[Conclusion]:
    engine, trainer = reference.engine, reference.trainer
    if engine is None or trainer is None or math.isnan(reference.difference):
        return []
    if reference.difference == 0 and reference.difference_low == reference.difference_high:
        return [Conclusion("nearer-to-reference", f"{engine} and {trainer} are equally near to float32.")]
    if math.isnan(reference.difference_low) or reference.difference_low <= 0 <= reference.difference_high:
        return [
            Conclusion(
                "cannot-tell",
                f"Cannot tell whether {engine} or {trainer} is nearer to float32: E[d²] of the engine less that of the "
                f"trainer is {_interval_of_difference(reference)}.",
            )
        ]
    nearer, other = (trainer, engine) if reference.difference > 0 else (engine, trainer)
    return [
        Conclusion(
            "nearer-to-reference",
            f"Nearer to float32 than {other}: {nearer} (E[d²] of the engine less that of the trainer is "
            f"{_interval_of_difference(reference)}).",
        )
    ]


def _interval_of_difference(reference: SideBranchRecord) -> str:
    if math.isnan(reference.difference_low):
        return f"{number(reference.difference)}, without an interval: too few prompts"
    ends = interval_text(reference.difference_low, reference.difference_high)
    return f"{number(reference.difference)}, {ends}"


def conclude_exact(document: AttributionDocument, found: Sequence[ExactOfLinkRecord]) -> list[Conclusion]:
    """Return the size of each exact divergence, and whether it is above the noise floor of its two scorers."""
    return [_on_exact(document, exact) for exact in found]


def _on_exact(document: AttributionDocument, exact: ExactOfLinkRecord) -> Conclusion:
    # NaN if one of the two floors is unknown.
    floor = 0.5 * sum(_noise_floor(document, name) for name in (exact.target, exact.behaviour))
    if exact.tokens == 0:
        words = "no state has finite distributions of both scorers"
    elif exact.tv.mean == 0:
        words = f"the two distributions are equal at each of {plural(exact.tokens, 'visited state')}"
    else:
        words = _size(exact)
        if exact.kl.low > floor or exact.kl.high <= floor:
            is_above = "above" if exact.kl.low > floor else "not above"
            words += f"; it is {is_above} the noise floor of the two scorers, {number(floor)}"
    left_out = ""
    if exact.non_finite and exact.tokens:
        left_out = f" {plural(exact.non_finite, 'state')} with a value that is not finite left out."
    scope = (
        f"This compares {exact.target} (π) with {exact.behaviour} (μ) with the same weights: engine against trainer "
        "numerics, not the whole of trainer/rollout."
    )
    if exact.other_settings:
        scope += f" Its settings are not those of the link's scores: {', '.join(exact.other_settings)} differ."
    return Conclusion("exact", f"{exact.name}: {words}.{left_out} {scope}", exact.pair)


def _size(exact: ExactOfLinkRecord) -> str:
    return (
        f"KL(μ‖π) over the whole vocabulary is {number(exact.kl.mean)} nats per token "
        f"({_interval(exact.kl, exact.groups)}), without the sampling noise of k3 at the same tokens, "
        f"{number(exact.k3_kl.mean)} ({_interval(exact.k3_kl, exact.groups)}); total variation "
        f"{number(exact.tv.mean)}, Δmax {number(exact.delta_max)}, the likeliest token differs at "
        f"{number(100 * exact.top1_flip.mean)} % of {plural(exact.tokens, 'visited state')}"
    )


def _interval(found: MeanRecord, prompt_groups: int) -> str:
    if math.isfinite(found.low) and math.isfinite(found.high):
        return range_in_words(found.mean, found.low, found.high, number)
    few = prompt_groups < LEAST_CLUSTERS and (math.isnan(found.low) or math.isnan(found.high))
    needed = f": {plural(prompt_groups, 'prompt')}, {LEAST_CLUSTERS} are needed" if few else ""
    return interval_text(found.low, found.high) + needed


def conclude_attribution(
    document: AttributionDocument,
    others: Sequence[AttributionDocument] = (),
    exact: Sequence[ExactOfLinkRecord] = (),
) -> tuple[Conclusion, ...]:
    """Return the conclusions on a step's attribution; the first one is the headline.

    `others` are the attributions of the run's other probed steps, in step order; `exact` are of this step.
    """
    found = conclude_environments(document, others)
    found += conclude_adapters(document)
    links = conclude_links(document, found)
    # The link that has most of the mismatch says more than another environment of one that has little.
    first, then = (links, found) if any(each.names_cause for each in links) else (found, links)
    return (*first, *then, *conclude_precision(document), *conclude_exact(document, exact))
