"""The measures written down directly: loops, math.fsum and the formulas, sharing no code with the library."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from foreshock.rollouts import RolloutBatch

Sequence = list[tuple[float, float, float, int]]  # log π, log μ, entropy, turn of each measured token


def measured_sequences(batch: RolloutBatch) -> tuple[list[Sequence], list[str]]:
    """The measured tokens of each rollout that has any, and its prompt group (its own id where it has none)."""
    assert batch.trainer_log_probs is not None
    assert batch.rollout_log_probs is not None
    sequences, groups = [], []
    for row in range(batch.num_rollouts):
        tokens: Sequence = []
        for index in range(int(batch.response_offsets[row]), int(batch.response_offsets[row + 1])):
            log_target, log_behaviour = float(batch.trainer_log_probs[index]), float(batch.rollout_log_probs[index])
            sampled = batch.response_mask is None or batch.response_mask[index] == 1
            if sampled and math.isfinite(log_target) and math.isfinite(log_behaviour):
                entropy = float(batch.entropy[index]) if batch.entropy is not None else math.nan
                turn = int(batch.turn[index]) if batch.turn is not None else 0
                tokens.append((log_target, log_behaviour, entropy, turn))
        if tokens:
            group = batch.group_ids[row] if batch.group_ids is not None else None
            sequences.append(tokens)
            groups.append(group if group is not None else f"alone-{row}")
    return sequences, groups


def mean(values: list[float]) -> float:
    """Σ / n, exactly rounded."""
    return math.fsum(values) / len(values) if values else math.nan


TOKEN_FORMULAS = {
    "kl": lambda d: -d,
    "k2_kl": lambda d: d * d / 2,
    "k3_kl": lambda d: math.expm1(d) - d,
    "chi2_token": lambda d: math.expm1(d) ** 2,
    "reverse_chi2_token": lambda d: math.expm1(d) ** 2 / math.exp(d),
    "tv_token": lambda d: max(-math.expm1(d), 0.0),
    "verl_chi2_token": lambda d: math.expm1(2 * d),
    "mean_ratio": lambda d: math.exp(d),
    "token_mult_prob_error": lambda d: math.exp(abs(d)),
}


def direct_measures(batch: RolloutBatch) -> dict[str, float]:
    """Every measure that a formula of facts gives, by its column."""
    sequences, groups = measured_sequences(batch)
    tokens = [token for sequence in sequences for token in sequence]
    d = [log_target - log_behaviour for log_target, log_behaviour, _, _ in tokens]
    of_sequences = [[log_target - log_behaviour for log_target, log_behaviour, _, _ in part] for part in sequences]
    result = {name: mean([formula(value) for value in d]) for name, formula in TOKEN_FORMULAS.items()}
    for name, formula in TOKEN_FORMULAS.items():
        result[f"{name}_seq_mean"] = mean([mean([formula(value) for value in part]) for part in of_sequences])
    sums = [math.fsum(part) for part in of_sequences]
    means = [mean(part) for part in of_sequences]
    result |= {
        "mean_abs_d": mean([abs(value) for value in d]),
        "rms_d": math.sqrt(mean([value * value for value in d])),
        "max_abs_d": max(abs(value) for value in d),
        "min_d": min(d),
        "max_d": max(d),
        "zero_fraction": sum(value == 0 for value in d) / len(d),
        "tail_asymmetry_1": mean([float(value < -1) - (math.exp(value) if value > 1 else 0.0) for value in d]),
        "log_ppl_diff": -mean(means),
        "log_ppl_abs_diff": mean([abs(value) for value in means]),
        "sequence_log_ppl_abs_diff": mean([abs(value) for value in sums]),
        "geo_ratio": mean([math.exp(value) for value in means]),
        "verl_chi2_seq": mean([math.expm1(2 * value) for value in sums]),
        "ess_token": effective_fraction(d),
    }
    for threshold in (2, 5, 10):
        above = sum(max(math.exp(value), math.exp(-value)) > threshold for value in d)
        result[f"tail_{threshold}"] = above / len(d)
    return result | probabilities(tokens) | clustered(sequences, groups) | weights(sequences, sums, result["k3_kl"])


def effective_fraction(log_weights: list[float]) -> float:
    """(Σw)² / (N Σw²)."""
    top = max(log_weights)
    scaled = [math.exp(value - top) for value in log_weights]
    return math.fsum(scaled) ** 2 / (len(scaled) * math.fsum([value * value for value in scaled]))


def weights(sequences: list[Sequence], sums: list[float], k3: float) -> dict[str, float]:
    """Effective sample sizes of sequences and turns, NaN where 2·KL·T > ln N."""
    turns: list[list[float]] = []
    for part in sequences:
        for index, (log_target, log_behaviour, _, turn) in enumerate(part):
            if index == 0 or turn != part[index - 1][3]:
                turns.append([])
            turns[-1].append(log_target - log_behaviour)
    tokens = sum(len(part) for part in sequences)
    seen = {}
    for name, log_weights in (("ess_seq", sums), ("ess_turn", [math.fsum(turn) for turn in turns])):
        estimable = 2 * k3 * tokens / len(log_weights) <= math.log(len(log_weights))
        seen[name] = effective_fraction(log_weights) if estimable else math.nan
    return seen


def probabilities(tokens: Sequence) -> dict[str, float]:
    """verl's measures of probabilities."""
    target, behaviour = [math.exp(token[0]) for token in tokens], [math.exp(token[1]) for token in tokens]
    gaps = [math.exp(max(token[0], token[1])) * -math.expm1(-abs(token[0] - token[1])) for token in tokens]
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


def clustered(sequences: list[Sequence], groups: list[str]) -> dict[str, float]:
    """Half widths of the intervals over √(t quantile), and the standardised surprisal, by prompt group."""
    by_group: dict[str, Sequence] = defaultdict(list)
    for part, group in zip(sequences, groups, strict=True):
        by_group[group].extend(part)
    tokens = sum(len(part) for part in sequences)
    errors = {}
    for name in ("kl", "k3_kl"):
        formula = TOKEN_FORMULAS[name]
        totals = [math.fsum([formula(a - b) for a, b, _, _ in part]) for part in by_group.values()]
        center = math.fsum(totals) / tokens
        residuals = [total - center * len(part) for total, part in zip(totals, by_group.values(), strict=True)]
        count = len(residuals)
        variance = math.fsum([value * value for value in residuals]) * count / (count - 1) if count > 1 else math.nan
        errors[f"{name}_standard_error"] = math.sqrt(variance) / tokens
    surprisals = [math.fsum([-b - entropy for _, b, entropy, _ in part]) for part in by_group.values()]
    entropies = [token[2] for part in sequences for token in part]
    spread = math.sqrt(math.fsum([value * value for value in surprisals]))
    k3 = mean([TOKEN_FORMULAS["k3_kl"](a - b) for part in sequences for a, b, _, _ in part])
    return errors | {
        "surprisal_z": math.fsum(surprisals) / spread if len(surprisals) > 1 else math.nan,
        "k3_kl_per_entropy": k3 / mean(entropies),
    }


def plainly_logged(direct: dict[str, float]) -> dict[str, float]:
    """Those that need neither entropies nor turns and have a direct counterpart in the library."""
    needs = ("surprisal_z", "k3_kl_per_entropy", "ess_turn")
    return {name: value for name, value in direct.items() if name not in needs and not name.endswith("standard_error")}


def direct_lengths(batch: RolloutBatch) -> np.ndarray:
    """[N] model-generated tokens."""
    mask = np.ones(batch.num_tokens) if batch.response_mask is None else batch.response_mask
    rows = zip(batch.response_offsets[:-1], batch.response_offsets[1:], strict=True)
    return np.array([int(mask[first:last].sum()) for first, last in rows])
