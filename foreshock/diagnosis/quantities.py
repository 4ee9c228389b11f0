"""The names that trainers log, and the detectors' quantity for each. Backtests and the service read this table.

A quantity is `comparison:measure`, such as `rollout:response_length_mean`. A run may declare other names for its
scalars: a declared quantity is read from that name only.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.errors import did_you_mean

LENGTH_KEY = f"{STEP_ROW}:response_length_mean"
LONGEST_KEY = f"{STEP_ROW}:response_length_max"
TRUNCATED_KEY = f"{STEP_ROW}:truncated_fraction"
REWARD_KEY = f"{STEP_ROW}:reward_mean"
ENTROPY_KEY = f"{STEP_ROW}:entropy_mean"
GRADIENT_NORM_KEY = "scalars:grad_norm"
LEARNING_RATE_KEY = "scalars:lr"
TOKENS_KEY = f"{TRAINER_ROLLOUT}:tokens"
MEAN_D_KEY = f"{TRAINER_ROLLOUT}:mean_abs_d"
LARGEST_D_KEY = f"{TRAINER_ROLLOUT}:max_abs_d"
UPDATE_KEY = "scalars:update_k3"
"""k3 of the policy after a step's update against the one before, on the step's rollouts, in nats per token."""
LAST_STEP_NAME = "planned_last_step"
LAST_STEP_KEY = f"scalars:{LAST_STEP_NAME}"
"""The number of the last step that the trainer plans."""

FIRST_SOURCE: Final = "trainer"
"""The preferred source if several report a scalar; without it, the first source by name is used."""

SCALARS = "scalars"
"""The first part of a quantity that only scalars have, such as `scalars:grad_norm`."""

# Quantity → names, the preferred one first: those of released trainers (docs/connect-a-trainer.md names the sources)
# and of plain CSV files. A name of another definition is left out, such as verl's chi2_token (ρ² − 1) and AReaL's
# behave_approx_kl (the mean of d).
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    LENGTH_KEY: (
        "response_length/mean", "response_length_mean", "response_length", "completions/mean_length",
        "completion_length", "rollout/response_len/mean", "rollout/response_lengths", "seq_len/all/mean",
        "mean_gen_tokens_per_sample", "generate/avg_num_tokens", "val/sequence_lengths", "env/all/ac_tokens_per_turn",
        "ppo_actor/seq_len/avg",
        "rollout/response_length/mean", "tokens/response_length/mean", "batch/step_response_length/mean",
        "agg/effective/num_output_tokens/mean",
    ),
    LONGEST_KEY: (
        "response_length/max", "response_length_max", "completions/max_length", "rollout/response_len/max",
        "seq_len/all/max", "max_gen_tokens_per_sample", "generate/max_num_tokens", "val/sequence_lengths_max",
        "ppo_actor/seq_len/max",
        "rollout/response_length/max", "tokens/response_length/max", "batch/step_response_length/max",
        "agg/effective/num_output_tokens/max",
    ),
    TRUNCATED_KEY: (
        "response_length/clip_ratio", "clip_ratio_len", "completions/clipped_ratio", "truncated_fraction",
        "rollout/truncated_ratio", "rollout/truncated", "is_truncated/all/mean", "truncation_rate",
        "response_clip_ratio", "ppo_actor/no_eos_ratios/avg", "rollout/truncation_rate/mean",
    ),
    REWARD_KEY: (
        "reward", "reward_mean", "reward/mean", "critic/rewards/mean", "critic/score/mean", "rewards/mean",
        "rollout/raw_reward", "reward/all/mean", "all/reward/mean", "reward/avg_raw_reward", "env/all/reward/total",
        "ppo_actor/task_reward/avg", "rollout/reward", "scores", "rollout_reward/_mean", "rollout/score/mean",
    ),
    ENTROPY_KEY: (
        "entropy", "policy/entropy", "actor/entropy", "actor/entropy_loss", "entropy_mean", "entropy_loss",
        "entropy/all/mean", "entropy/mean", "approx_entropy", "policy/policy_entropy", "policy/entropy_avg",
        "optim/entropy", "ppo_actor/update/entropy/avg", "critic/entropy/mean", "trainer/entropy/mean",
    ),
    GRADIENT_NORM_KEY: (
        "grad_norm", "actor/grad_norm", "optim/grad_norm", "policy/grad_norm", "actor_grad_norm",
        "ppo_actor/update/grad_norm", "actor_train/grad_norm", "trainer/grad_norm/mean",
    ),
    LEARNING_RATE_KEY: (
        "lr", "learning_rate", "actor/lr", "lr-pg_0", "optim/lr", "policy/policy_lr", "actor_lr", "ppo_actor/update/lr",
        "trainer/lr", "progress/lr",
    ),
    UPDATE_KEY: ("update_k3", "actor/update_k3"),
    LAST_STEP_KEY: (LAST_STEP_NAME,),
    K3: (
        "k3", "k3_kl", "rollout_corr/k3_kl", "mismatch_kl/all/mean", "mismatch_kl/mean", "gen_kl_error",
        "train_rollout_kl", "offpolicy/k3_kl", "rollout_correction/k3_kl",
    ),
    f"{TRAINER_ROLLOUT}:kl": (
        "rollout_corr/kl", "vllm_kl", "optim/kl_sample_train_v1", "offpolicy/kl", "rollout_correction/kl",
    ),
    f"{TRAINER_ROLLOUT}:k2_kl": ("optim/kl_sample_train_v2",),
    f"{TRAINER_ROLLOUT}:token_mult_prob_error": ("token_mult_prob_error",),
    MEAN_D_KEY: (
        "sampling/sampling_logp_difference/mean", "train_rollout_logprob_abs_diff",
        "policy/rollout_train_logprobs_abs_diff_mean", "debug/vllm_vs_local_logprob_diff_mean",
        "offpolicy/logprob_abs_diff/mean",
    ),
    LARGEST_D_KEY: (
        "sampling/sampling_logp_difference/max", "policy/rollout_train_logprobs_abs_diff_max",
        "debug/vllm_vs_local_logprob_diff_max", "offpolicy/logprob_abs_diff/max", "bit_wise/logprob_diff/max",
    ),
    f"{TRAINER_ROLLOUT}:rollout_probs_diff_mean": (
        "rollout_probs_diff_mean", "training/rollout_probs_diff_mean", "offpolicy/prob_abs_diff/mean",
    ),
    f"{TRAINER_ROLLOUT}:rollout_probs_diff_max": (
        "rollout_probs_diff_max", "training/rollout_probs_diff_max", "offpolicy/prob_abs_diff/max",
    ),
    f"{TRAINER_ROLLOUT}:log_ppl_abs_diff": (
        "log_ppl_abs_diff", "rollout_corr/log_ppl_abs_diff", "offpolicy/log_ppl_abs_diff",
        "rollout_correction/log_ppl_abs_diff",
    ),
    f"{TRAINER_ROLLOUT}:training_ppl": (
        "training_ppl", "rollout_corr/training_ppl", "offpolicy/training_ppl", "rollout_correction/training_ppl",
    ),
}  # fmt: skip

STEP_NAMES = (
    "step", "Step", "global_step", "training/global_step", "train/global_step", "trainer/global_step", "training_step",
    "rollout/step", "train/step", "progress/batch", "system/step", "system/global_step", "_step",
)  # fmt: skip
"""The first one present counts: `_step` of W&B is the trainer's step only if nothing else is logged."""

_PREFIX = "train/"
_QUANTITIES: Final[Mapping[str, tuple[str, int]]] = {
    name: (quantity, rank) for quantity, names in NAMES.items() for rank, name in enumerate(names)
}
_NOTHING: Final[Mapping[str, str]] = {}


def check_declared(declared: Mapping[str, str]) -> None:
    """Raise ValueError if a key is neither a well-known name nor a quantity, or if two keys are of one quantity."""
    found: dict[str, str] = {}
    for known in declared:
        quantity = quantity_named(known)
        if quantity is None:
            meant = did_you_mean(known, _QUANTITIES)
            raise ValueError(
                f"{known!r} is no quantity that is watched{meant}; expected a well-known name such as reward or "
                "response_length/mean, or comparison:measure"
            )
        if quantity in found:
            raise ValueError(f"{found[quantity]!r} and {known!r} are the same quantity; declare it once")
        found[quantity] = known


def quantity_named(name: str) -> str | None:
    """Return the quantity of a well-known name; a name that is a quantity itself is returned, others give None."""
    found = _QUANTITIES.get(name) or _QUANTITIES.get(name.removeprefix(_PREFIX))
    if found is not None:
        return found[0]
    return name if ":" in name else None


def names_of(quantities: Iterable[str], declared: Mapping[str, str] = _NOTHING) -> tuple[str, ...]:
    """Return all scalar names of the quantities, the preferred name of each quantity first."""
    chosen = _declared_by_quantity(declared)
    taken = frozenset(chosen.values())
    names: dict[str, None] = {}
    for quantity in quantities:
        if quantity in chosen:
            names[chosen[quantity]] = None
            continue
        # A rule on a scalar reads it even if the run declares it as another quantity.
        others = frozenset() if quantity.startswith(f"{SCALARS}:") and quantity not in NAMES else taken
        for name in (quantity, *NAMES.get(quantity, ()), quantity.partition(":")[2]):
            names |= dict.fromkeys(each for each in (name, f"{_PREFIX}{name}") if each not in others)
    return tuple(names)


Value = TypeVar("Value")


def preferred_values(scalars: Mapping[str, Mapping[int, Value]], names: Sequence[str]) -> dict[int, Value]:
    """Return step → value, steps ascending; at each step the first of `names` that has a value counts.

    `scalars`: name → step → value. `names`: those of one quantity, as `names_of` gives them.
    """
    found: dict[int, Value] = {}
    for name in reversed(names):
        found |= scalars.get(name, {})
    return dict(sorted(found.items()))


def quantities_of(
    scalars: Mapping[str, float], declared: Mapping[str, str] = _NOTHING, quantities: Collection[str] = ()
) -> dict[str, float]:
    """Return the values by the detectors' quantities; if several names mean one quantity, the preferred one counts.

    A name of the detectors (``scalars:grad_norm``) is kept, and a prefix such as ``train/`` is ignored. A scalar that
    is named as the measure of one of `quantities` (``tail_2``) has that quantity, unless it is well known;
    ``scalars:loss`` among `quantities` always means the scalar ``loss``.
    """
    chosen = _declared_by_quantity(declared)
    names = {name: quantity for quantity, name in chosen.items()}
    measures = {quantity.partition(":")[2]: quantity for quantity in quantities}
    best: dict[str, tuple[int, float]] = {}
    for name, value in scalars.items():
        plain = name.removeprefix(_PREFIX)
        own = f"{SCALARS}:{plain}"
        if own in quantities and own not in chosen and own not in NAMES and (own not in best or name == plain):
            best[own] = (0, value)
        if name in names:
            best[names[name]] = (-1, value)
            continue
        quantity, rank = (
            _QUANTITIES.get(name)
            or _QUANTITIES.get(plain)
            or (plain if ":" in plain else measures.get(plain, ""), -1 if ":" in plain else len(NAMES))
        )
        if quantity and quantity not in chosen and (quantity not in best or rank < best[quantity][0]):
            best[quantity] = (rank, value)
    return {quantity: value for quantity, (_, value) in best.items()}


def recognised(names: Iterable[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return quantity → the preferred one of these names of it, and the names of no quantity; both sorted."""
    given = sorted(set(names))
    quantities = {name: next(iter(quantities_of({name: 0.0})), None) for name in given}
    found = sorted({each for each in quantities.values() if each is not None})
    read = {each: next(name for name in names_of([each]) if quantities.get(name) == each) for each in found}
    return read, tuple(name for name in given if quantities[name] is None)


def _declared_by_quantity(declared: Mapping[str, str]) -> dict[str, str]:
    return {quantity: name for known, name in declared.items() if (quantity := quantity_named(known)) is not None}
