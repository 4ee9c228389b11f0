"""Names of comparisons: `target/behaviour`, an ordered pair of scorers such as `trainer/rollout` (π/μ)."""

from foreshock.errors import ConfigurationError

# The comparison of the two logged scores: the trainer's log π with the engine's log μ.
TRAINER_ROLLOUT = "trainer/rollout"
# The name under which a step's own measures (lengths, rewards, entropy) are stored; they compare no two scores.
STEP_ROW = "rollout"


def comparison_name(target: str, behaviour: str) -> str:
    """Return the name of the comparison of the scorers `target` (π) and `behaviour` (μ)."""
    return f"{target}/{behaviour}"


def split_comparison(name: str) -> tuple[str, str]:
    """Return (target, behaviour) of a comparison's name. Raises ConfigurationError if `name` is not of that form."""
    target, _, behaviour = name.partition("/")
    if not target or not behaviour:
        raise ConfigurationError(f"a comparison must be target/behaviour, such as {TRAINER_ROLLOUT}, got {name!r}")
    return target, behaviour
