"""The catalogue of the checks: each is a file that counts and judges. A new check is a file and a name in `CHECKS`.

The order is that of the report: findings that make all other numbers meaningless come first.
"""

from foreshock.lint.checks.after_id import AFTER_ID
from foreshock.lint.checks.after_update import AFTER_UPDATE
from foreshock.lint.checks.declared import LAG_UNKNOWN
from foreshock.lint.checks.duplicates import DUPLICATED, SAME_RESPONSE
from foreshock.lint.checks.early import BANNED_EARLY
from foreshock.lint.checks.k3_per_entropy import K3_PER_ENTROPY
from foreshock.lint.checks.learning_signal import (
    AGAINST_REWARDS,
    GROUPS,
    NO_SPREAD,
    NOT_OF_GROUP,
    OUTLIER,
    UNREWARDED,
)
from foreshock.lint.checks.masked import MASKED
from foreshock.lint.checks.missing import PAD_ID, WITHOUT_ENGINE, WITHOUT_TRAINER
from foreshock.lint.checks.not_sampled import NOT_SAMPLED
from foreshock.lint.checks.pairs import IDENTICAL
from foreshock.lint.checks.penalty import PENALTY
from foreshock.lint.checks.places import BY_PLACE, EVERYWHERE
from foreshock.lint.checks.ratio import CLIPPED, LIKELIER, MEAN_RATIO, OUTSIDE, PROCESSED
from foreshock.lint.checks.responses import ABORTED, ALL_TRUNCATED, CONTEXT_LIMIT, EMPTY, UNFINISHED
from foreshock.lint.checks.rounding import ROUNDED
from foreshock.lint.checks.row_order import EXCHANGED
from foreshock.lint.checks.sampling import ENTROPY_OF_TRAINER, NOT_DECLARED, RAW
from foreshock.lint.checks.shift import SHIFTED
from foreshock.lint.checks.temperature import DIFFER, LOG_BASE, OF_TRAINER
from foreshock.lint.checks.values import NON_FINITE, NON_FINITE_VALUES, SIGNS
from foreshock.lint.judging import Check

_ALL = (
    *SIGNS,
    NON_FINITE,
    IDENTICAL,
    LOG_BASE,
    EXCHANGED,
    RAW,
    ENTROPY_OF_TRAINER,
    OF_TRAINER,
    PENALTY,
    DIFFER,
    K3_PER_ENTROPY,
    PROCESSED,
    OUTSIDE,
    LIKELIER,
    MEAN_RATIO,
    SHIFTED,
    PAD_ID,
    AFTER_ID,
    AFTER_UPDATE,
    BANNED_EARLY,
    BY_PLACE,
    EVERYWHERE,
    WITHOUT_ENGINE,
    WITHOUT_TRAINER,
    MASKED,
    NOT_SAMPLED,
    DUPLICATED,
    SAME_RESPONSE,
    CLIPPED,
    NON_FINITE_VALUES,
    AGAINST_REWARDS,
    OUTLIER,
    NOT_DECLARED,
    LAG_UNKNOWN,
    GROUPS,
    NO_SPREAD,
    UNREWARDED,
    NOT_OF_GROUP,
    EMPTY,
    ABORTED,
    UNFINISHED,
    ALL_TRUNCATED,
    CONTEXT_LIMIT,
    ROUNDED,
)

CHECKS: dict[str, Check] = {check.name: check for check in _ALL}
