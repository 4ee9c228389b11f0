"""Direct evaluation of the measures: loops, math.fsum and the formulas, without code of the library."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from foreshock.measures.statistics.conditions import BUCKET_EDGES, CONDITIONS
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch


class Token(NamedTuple):
    """A measured token; NaN for values that were not logged."""

    log_target: float
    log_behaviour: float
    entropy: float
    turn: int
    advantage: float
    lag: float
    token_id: int
    position: int
    length: int  # generated tokens of its rollout

    @property
    def d(self) -> float:
        return self.log_target - self.log_behaviour

    @property
    def gap(self) -> float:
        """|π − μ|."""
        return math.exp(max(self.log_target, self.log_behaviour)) * -math.expm1(-abs(self.d))


Sequence = list[Token]


def measured_sequences(batch: RolloutBatch) -> tuple[list[Sequence], list[str]]:
    """Return the measured tokens of each rollout that has any, and its prompt group (its own id if it has none)."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    trained = batch.attributes.trainer_weights_version
    sequences, groups = [], []
    for row in range(batch.num_rollouts):
        tokens: Sequence = []
        span = range(int(batch.response_offsets[row]), int(batch.response_offsets[row + 1]))
        sampled = [index for index in span if batch.response_mask is None or batch.response_mask[index] == 1]
        for index in sampled:
            log_target, log_behaviour = float(batch.trainer_log_probs[index]), float(batch.rollout_log_probs[index])
            if math.isfinite(log_target) and math.isfinite(log_behaviour):
                lag = math.nan
                if batch.weights_version is not None and trained is not None:
                    lag = trained - int(batch.weights_version[index])
                advantage = math.nan
                if batch.advantage is not None:
                    advantage = float(batch.advantage[index if batch.advantage_per_token else row])
                tokens.append(
                    Token(
                        log_target,
                        log_behaviour,
                        float(batch.entropy[index]) if batch.entropy is not None else math.nan,
                        int(batch.turn[index]) if batch.turn is not None else 0,
                        advantage,
                        lag,
                        int(batch.response_token_ids[index]),
                        index - span.start,
                        len(sampled),
                    )
                )
        if tokens:
            group = batch.group_ids[row] if batch.group_ids is not None else None
            sequences.append(tokens)
            groups.append(group if group is not None else f"alone-{row}")
    return sequences, groups


def mean(values: list[float]) -> float:
    """Return Σ / n, exactly rounded."""
    return math.fsum(values) / len(values) if values else math.nan


def k3(d: float) -> float:
    """Return ρ − 1 − d; its series near 0, where expm1(d) − d loses digits."""
    if abs(d) >= 0.1:
        return math.expm1(d) - d
    return math.fsum(d**power / math.factorial(power) for power in range(2, 14))


TOKEN_FORMULAS: dict[str, Callable[[float], float]] = {
    "kl": lambda d: -d,
    "k2_kl": lambda d: d * d / 2,
    "k3_kl": k3,
    "chi2_token": lambda d: math.expm1(d) ** 2,
    "reverse_chi2_token": lambda d: math.expm1(d) ** 2 / math.exp(d),
    "tv_token": lambda d: max(-math.expm1(d), 0.0),
    "verl_chi2_token": lambda d: math.expm1(2 * d),
    "mean_ratio": lambda d: math.exp(d),
    "token_mult_prob_error": lambda d: math.exp(abs(d)),
}
INTERVALS = ("kl", "k3_kl", "chi2_token", "reverse_chi2_token", "tv_token")
LEVELS = {"ln2": math.log(2), "1": 1.0, "3": 3.0}


def direct_measures(batch: RolloutBatch) -> dict[str, float]:
    """Return every measure that has a formula, by column."""
    sequences, groups = measured_sequences(batch)
    tokens = [token for sequence in sequences for token in sequence]
    d = [token.d for token in tokens]
    result = {name: mean([formula(value) for value in d]) for name, formula in TOKEN_FORMULAS.items()}
    whole = [part for part in sequences if len(part) == part[0].length]
    result |= {
        "k3_kl_seq_mean": mean([mean([k3(token.d) for token in part]) for part in whole]),
        "mean_abs_d": mean([abs(value) for value in d]),
        "rms_d": math.sqrt(mean([value * value for value in d])),
        "max_abs_d": max(abs(value) for value in d),
        "min_d": min(d),
        "max_d": max(d),
        "zero_fraction": sum(value == 0 for value in d) / len(d),
        "ess_token": effective_fraction(d),
        "pinsker_tv_bound": math.sqrt(result["chi2_token"]) / 2,
    }
    result |= tails(d) | probabilities(tokens) | of_low_probability(tokens) | of_lags(tokens)
    result |= of_sequences(whole) | of_advantages(tokens)
    return result | clustered(sequences, groups) | weights(whole)


def tails(d: list[float]) -> dict[str, float]:
    """Return both tails together by ratio, and each by itself by level."""
    result = {}
    for threshold in (2, 5, 10):
        above = sum(max(math.exp(value), math.exp(-value)) > threshold for value in d)
        result[f"tail_{threshold}"] = above / len(d)
    for name, level in LEVELS.items():
        result[f"tail_below_{name}"] = sum(value < -level for value in d) / len(d)
        result[f"tail_above_{name}"] = sum(value > level for value in d) / len(d)
        result[f"tail_asymmetry_{name}"] = mean(
            [float(value < -level) - (math.exp(value) if value > level else 0.0) for value in d]
        )
    return result


def of_sequences(sequences: list[Sequence]) -> dict[str, float]:
    """Return means and extremes over sequences of which each token was measured."""
    sums = [math.fsum([token.d for token in part]) for part in sequences]
    means = [mean([token.d for token in part]) for part in sequences]
    target = [-mean([token.log_target for token in part]) for part in sequences]
    behaviour = [-mean([token.log_behaviour for token in part]) for part in sequences]
    return {
        "log_ppl_diff": -mean(means),
        "log_ppl_abs_diff": mean([abs(value) for value in means]),
        "log_ppl_diff_max": max((-value for value in means), default=math.nan),
        "log_ppl_diff_min": min((-value for value in means), default=math.nan),
        "ppl_ratio": mean([math.exp(-value) for value in means]),
        "training_ppl": mean([math.exp(value) for value in target]),
        "training_log_ppl": mean(target),
        "rollout_ppl": mean([math.exp(value) for value in behaviour]),
        "rollout_log_ppl": mean(behaviour),
        "sequence_log_ppl_abs_diff": mean([abs(value) for value in sums]),
        "geo_ratio": mean([math.exp(value) for value in means]),
        "verl_chi2_seq": mean([math.expm1(2 * value) for value in sums]),
    }


def of_advantages(tokens: Sequence) -> dict[str, float]:
    """Return the measures of d with the advantage, over the tokens with an advantage."""
    known = [token for token in tokens if math.isfinite(token.advantage)]
    if not known:
        names = ("d_cov", "skew_positive", "skew_negative", "skew")
        return dict.fromkeys([*(f"advantage_{name}" for name in names), "bad_update_fraction"], math.nan)
    mean_a, mean_d = mean([token.advantage for token in known]), mean([token.d for token in known])
    skew = [token.advantage * math.expm1(token.d) for token in known]
    signed = list(zip(skew, known, strict=True))
    bad = [token.advantage < 0 and token.d < 0 and token.gap >= 0.5 for token in known]
    return {
        "advantage_d_cov": mean([(token.advantage - mean_a) * (token.d - mean_d) for token in known]),
        "advantage_skew_positive": mean([value if token.advantage > 0 else 0.0 for value, token in signed]),
        "advantage_skew_negative": mean([value if token.advantage < 0 else 0.0 for value, token in signed]),
        "advantage_skew": mean(skew),
        "bad_update_fraction": sum(bad) / len(known),
    }


def effective_fraction(log_weights: list[float]) -> float:
    """Return (Σw)² / (N Σw²)."""
    top = max(log_weights)
    scaled = [math.exp(value - top) for value in log_weights]
    return math.fsum(scaled) ** 2 / (len(scaled) * math.fsum([value * value for value in scaled]))


def weights(whole: list[Sequence]) -> dict[str, float]:
    """Return the effective sample sizes of whole sequences and of their turns, NaN if 2·KL·T > ln N."""
    turns: list[list[float]] = []
    for part in whole:
        for index, token in enumerate(part):
            if index == 0 or token.turn != part[index - 1].turn:
                turns.append([])
            turns[-1].append(token.d)
    k3_sum = math.fsum([k3(token.d) for part in whole for token in part])
    seen = {"ess_seq_predicted": math.exp(-2 * k3_sum / len(whole)) if whole else math.nan}
    sums = [math.fsum([token.d for token in part]) for part in whole]
    for name, log_weights in (("ess_seq", sums), ("ess_turn", [math.fsum(turn) for turn in turns])):
        estimable = log_weights and 2 * k3_sum / len(log_weights) <= math.log(len(log_weights))
        seen[name] = effective_fraction(log_weights) if estimable else math.nan
    return seen


def probabilities(tokens: Sequence) -> dict[str, float]:
    """Return verl's measures of probabilities."""
    target = [math.exp(token.log_target) for token in tokens]
    behaviour = [math.exp(token.log_behaviour) for token in tokens]
    gaps = [token.gap for token in tokens]
    gap_mean, target_mean, behaviour_mean = mean(gaps), mean(target), mean(behaviour)
    square = math.fsum([(gap - gap_mean) ** 2 for gap in gaps])
    of_target = math.fsum([(value - target_mean) ** 2 for value in target])
    of_behaviour = math.fsum([(value - behaviour_mean) ** 2 for value in behaviour])
    of_both = math.fsum([(a - target_mean) * (b - behaviour_mean) for a, b in zip(target, behaviour, strict=True)])
    scale = math.sqrt(of_target) * math.sqrt(of_behaviour)
    return {
        "rollout_probs_diff_mean": gap_mean,
        "rollout_probs_diff_max": max(gaps),
        "rollout_probs_diff_std": math.sqrt(square / (len(gaps) - 1)) if len(gaps) > 1 else math.nan,
        "rollout_actor_probs_pearson_corr": of_both / scale if scale else math.nan,
    }


def of_low_probability(tokens: Sequence) -> dict[str, float]:
    """Return the mean |d| and the number of the tokens with a probability below 0.1 under μ."""
    low = [token for token in tokens if token.log_behaviour < math.log(0.1)]
    return {"low_probability_abs_d": mean([abs(token.d) for token in low]), "low_probability_tokens": len(low)}


def of_lags(tokens: Sequence) -> dict[str, float]:
    """Return k3 and the number of tokens at each lag; 0 tokens if lags are unknown."""
    ends = {"5_8": (5, 8), "9_16": (9, 16), "17": (17, math.inf), **{str(lag): (lag, lag) for lag in range(5)}}
    found: dict[str, float] = {}
    for name, (first, last) in ends.items():
        there = [token for token in tokens if first <= token.lag <= last]
        found |= {f"k3_kl_lag_{name}": mean([k3(token.d) for token in there]), f"tokens_lag_{name}": len(there)}
    return found


def clustered(sequences: list[Sequence], groups: list[str]) -> dict[str, float]:
    """Return the standard error of each of INTERVALS, and the standardised surprisal, by prompt group."""
    by_group: dict[str, Sequence] = defaultdict(list)
    for part, group in zip(sequences, groups, strict=True):
        by_group[group].extend(part)
    tokens = sum(len(part) for part in sequences)
    errors = {}
    for name in INTERVALS:
        formula = TOKEN_FORMULAS[name]
        totals = [math.fsum([formula(token.d) for token in part]) for part in by_group.values()]
        center = math.fsum(totals) / tokens
        residuals = [total - center * len(part) for total, part in zip(totals, by_group.values(), strict=True)]
        count = len(residuals)
        variance = math.fsum([value * value for value in residuals]) * count / (count - 1) if count > 1 else math.nan
        errors[f"{name}_standard_error"] = math.sqrt(variance) / tokens
    known = [[token for token in part if math.isfinite(token.entropy)] for part in by_group.values()]
    surprisals = [math.fsum([-token.log_behaviour - token.entropy for token in part]) for part in known]
    entropies = [token.entropy for part in known for token in part]
    spread = math.sqrt(math.fsum([value * value for value in surprisals]))
    k3_mean = mean([k3(token.d) for part in sequences for token in part])
    return errors | {
        "surprisal_z": math.fsum(surprisals) / spread if len(surprisals) > 1 and entropies else math.nan,
        "k3_kl_per_entropy": k3_mean / mean(entropies) if entropies else math.nan,
    }


def plainly_logged(direct: dict[str, float]) -> dict[str, float]:
    """Return the measures that need neither entropies nor turns."""
    needs = ("surprisal_z", "k3_kl_per_entropy", "ess_turn")
    return {name: value for name, value in direct.items() if name not in needs and not name.endswith("standard_error")}


def direct_lengths(batch: RolloutBatch) -> np.ndarray:
    """Return the number of model-generated tokens of each rollout, [N]."""
    mask = np.ones(batch.num_tokens) if batch.response_mask is None else batch.response_mask
    rows = zip(batch.response_offsets[:-1], batch.response_offsets[1:], strict=True)
    return np.array([int(mask[first:last].sum()) for first, last in rows])


VALUE_OF: dict[str, Callable[[Token], float]] = {
    "probability": lambda token: token.log_behaviour, "position": lambda token: token.position,
    "turn": lambda token: token.turn, "length": lambda token: token.length, "entropy": lambda token: token.entropy,
    "lag": lambda token: token.lag,
}  # fmt: skip


class DirectSums(NamedTuple):
    """The sums of |d|, d, k3 and |π − μ| over some tokens, those of absolute values, and the largest |d|."""

    tokens: int
    sums: list[float]
    largest: float

    @classmethod
    def of(cls, tokens: Sequence) -> DirectSums:
        terms = [[abs(t.d) for t in tokens], [t.d for t in tokens], [k3(t.d) for t in tokens], [t.gap for t in tokens]]
        return cls(len(tokens), [math.fsum(term) for term in terms], max(terms[0], default=0.0))


def direct_condition(name: str, tokens: Sequence) -> list[DirectSums]:
    """Return the sums of each bucket of a condition."""
    edges = CONDITIONS[name].edges
    if name == "probability":
        edges = (-math.inf, *(math.log(edge) for edge in BUCKET_EDGES[1:-1]), math.inf)
    buckets: dict[int, Sequence] = defaultdict(list)
    for token in tokens:
        value = VALUE_OF[name](token)
        if math.isfinite(value):
            # The first bucket also takes all smaller values, the last all larger ones.
            buckets[sum(value >= edge for edge in edges[1:-1])].append(token)
    return [DirectSums.of(buckets[index]) for index in range(len(edges) - 1)]


def direct_token_ids(tokens: Sequence) -> dict[int, DirectSums]:
    """Return the sums of each token id, by rising id."""
    by_id: dict[int, Sequence] = defaultdict(list)
    for token in tokens:
        by_id[token.token_id].append(token)
    return {token_id: DirectSums.of(by_id[token_id]) for token_id in sorted(by_id)}


def tail_terms(token: Token) -> tuple[float, float, float, float]:
    """Return ρ − 1, (ρ − 1)², A and A·(ρ − 1); A is 0 if there is none."""
    advantage = token.advantage if math.isfinite(token.advantage) else 0.0
    above = math.expm1(token.d)
    return above, above * above, advantage, advantage * above


def broken_batch(seed: int, rollouts: int, sizes: tuple[float, float]) -> RolloutBatch:
    """Return a batch with some non-finite log-probs, entropies and advantages, some d = 0, and some empty rollouts."""
    batch = random_batch(seed, rollouts, 60, *sizes)
    generator = np.random.default_rng(seed)
    changed = {}
    for name in ("trainer_log_probs", "rollout_log_probs", "entropy", "advantage"):
        values = getattr(batch, name).copy()
        odd = [math.nan, -math.inf, math.inf]
        values[generator.random(values.size) < 0.05] = odd[generator.integers(3)]
        changed[name] = values
    same = generator.random(batch.num_tokens) < 0.1
    changed["trainer_log_probs"][same] = changed["rollout_log_probs"][same]
    return dataclasses.replace(batch, **changed)
