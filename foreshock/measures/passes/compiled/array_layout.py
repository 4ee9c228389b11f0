"""Indices into the arrays of the compiled pass, and sizes that are built into its machine code."""

from __future__ import annotations

from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, TOKEN_SUMS
from foreshock.measures.statistics.tails import LARGEST_VALUES, TAIL_LEVELS
from foreshock.measures.statistics.token_ids import TOKEN_ID_SUMS

# Tokens of a chunk: its rows of numbers stay in a core's cache.
CHUNK = 512
# Chunks between two flushes of plain sums into compensated sums.
CHUNKS_BETWEEN_FLUSHES = 16

# Rows of `work`, [FLOAT_ROWS, CHUNK]. GROWTH is exp|d| − 1, SHRINKAGE 1 − exp(−|d|), DECAY exp(−|d|); TARGET and
# BEHAVIOUR are probabilities; SKEW is A·(ρ − 1).
LOG_TARGET, LOG_BEHAVIOUR, D, ABS_D, GROWTH, SHRINKAGE, DECAY, RATIO_MINUS_ONE, K3 = range(9)
TARGET, BEHAVIOUR, DIFFERENCE, ENTROPY, SURPRISAL, ADVANTAGE, SKEW = range(9, 16)
FLOAT_ROWS = 16
# Rows of `integers`, [INTEGER_ROWS, CHUNK]. KEPT is a measured token's position in the chunk, FINE its bin in the
# histogram, BUCKET the bucket that it is added to.
KEPT, TURN, LAG, TOKEN_ID, FINE, BUCKET = range(6)
INTEGER_ROWS = 6

# The item size of each input column in bytes, 0 if it was not logged.
(
    TARGET_FORMAT,
    BEHAVIOUR_FORMAT,
    MASK_FORMAT,
    ENTROPY_FORMAT,
    ADVANTAGE_FORMAT,
    TURN_FORMAT,
    LAG_FORMAT,
    TOKEN_IDS_FORMAT,
) = range(8)
ADVANTAGE_PER_ROLLOUT = 8  # 1: one advantage per rollout
FORMATS = 9

# Counts of a rollout, and of a lane.
TOKENS, GENERATED, ENTROPY_TOKENS, ADVANTAGE_TOKENS, TURNS = range(5)
ROLLOUT_COUNTS = 5
NONFINITE_TARGET, NONFINITE_BEHAVIOUR, ZERO_TOKENS, BAD_UPDATES, CHUNKS_UNFLUSHED = range(5)
LANE_COUNTS = 5

# State of the current rollout: running means of probabilities, and Σ d of the open turn.
MEAN_TARGET, MEAN_BEHAVIOUR, MEAN_DIFFERENCE, TURN_D = range(4)
ROLLOUT_STATE = 4

# Rows of `weights`: tokens whose ρ cannot overflow (plain sums), other tokens (scaled by the largest), and turns.
PLAIN_TOKENS, SCALED_TOKENS, SCALED_TURNS = range(3)
LARGEST, SCALED_SUM, SCALED_SQUARES = range(3)
# A chunk whose largest |d| is below this (nats) uses plain sums.
PLAIN_LIMIT = 300.0

FINE_BITS, FINE_SIZE = LOG_RATIO_GRID.bits, LOG_RATIO_GRID.size
FINE_FIRST = ((1023 + LOG_RATIO_GRID.lowest) << FINE_BITS) - 1
COARSE_BITS, COARSE_SIZE = WEIGHT_GRID.bits, WEIGHT_GRID.size
COARSE_FIRST = ((1023 + WEIGHT_GRID.lowest) << COARSE_BITS) - 1
LEVELS = len(TAIL_LEVELS)
FIRST_LEVEL = TAIL_LEVELS[0]

# Buckets with four sums each; the last takes tokens whose value is unknown. A lane has two copies, for even and odd
# tokens.
SUMS_PER_BUCKET = 4
TAIL_BUCKETS = 2 * COARSE_SIZE
CONDITION_BUCKETS: dict[str, int] = {}
_buckets = TAIL_BUCKETS + 2 * LEVELS
for _name, _condition in CONDITIONS.items():
    CONDITION_BUCKETS[_name] = _buckets
    _buckets += _condition.size
UNKNOWN_BUCKET = _buckets
BUCKETS = UNKNOWN_BUCKET + 1

PROBABILITY_BUCKETS, PROBABILITIES = CONDITION_BUCKETS["probability"], CONDITIONS["probability"].size
POSITION_BUCKETS, POSITIONS = CONDITION_BUCKETS["position"], CONDITIONS["position"].size
TURN_BUCKETS, TURN_SIZE = CONDITION_BUCKETS["turn"], CONDITIONS["turn"].size
LENGTH_BUCKETS, LENGTHS = CONDITION_BUCKETS["length"], CONDITIONS["length"].size
ENTROPY_BUCKETS, ENTROPIES = CONDITION_BUCKETS["entropy"], CONDITIONS["entropy"].size
LAG_BUCKETS, LAGS = CONDITION_BUCKETS["lag"], CONDITIONS["lag"].size

# A row of the table by token id: the number of tokens, then TOKEN_ID_SUMS.
ID_COLUMNS = 1 + len(TOKEN_ID_SUMS)

KEPT_VALUES = LARGEST_VALUES
# Size of the buffer of largest values; a full buffer is cut to KEPT_VALUES.
VALUES_BUFFER = 4 * LARGEST_VALUES
PROBABILITY_GAP = DPPO_PROBABILITY_GAP

SUMS = len(TOKEN_SUMS)
SUM_D, SUM_ABS_D, SUM_D2, SUM_K3 = map(TOKEN_SUMS.index, ("d", "abs_d", "d2", "k3_kl"))
SUM_RATIO_MINUS_ONE, SUM_CHI2, SUM_REVERSE_CHI2, SUM_TV = map(
    TOKEN_SUMS.index, ("ratio_minus_one", "chi2_token", "reverse_chi2_token", "tv_token")
)
SUM_GROWTH, SUM_LOG_TARGET, SUM_LOG_BEHAVIOUR = map(
    TOKEN_SUMS.index, ("prob_error_minus_one", "log_target", "log_behaviour")
)
SUM_TARGET, SUM_BEHAVIOUR, SUM_DIFFERENCE = map(
    TOKEN_SUMS.index, ("target_probability", "behaviour_probability", "abs_probability_difference")
)
WITHIN_TARGET, WITHIN_BEHAVIOUR, WITHIN_PRODUCT, WITHIN_DIFFERENCE = map(
    TOKEN_SUMS.index, ("within_target", "within_behaviour", "within_product", "within_difference")
)
SUM_ENTROPY, SUM_SURPRISAL = map(TOKEN_SUMS.index, ("entropy", "surprisal"))
SUM_ADVANTAGE, SUM_ADVANTAGE2, SUM_ADVANTAGE_D = map(TOKEN_SUMS.index, ("advantage", "advantage2", "advantage_d"))
SUM_POSITIVE_SKEW, SUM_NEGATIVE_SKEW, SUM_D_WITH_ADVANTAGE = map(
    TOKEN_SUMS.index, ("positive_advantage_skew", "negative_advantage_skew", "d_with_advantage")
)
