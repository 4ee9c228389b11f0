"""Where things stand in the arrays of the compiled pass: numbers that machine code has built in."""

from __future__ import annotations

from foreshock.measures.statistics.conditions import CONDITIONS
from foreshock.measures.statistics.histograms import LOG_RATIO_GRID, WEIGHT_GRID
from foreshock.measures.statistics.rollout_sums import DPPO_PROBABILITY_GAP, TOKEN_SUMS
from foreshock.measures.statistics.tails import LARGEST_VALUES, TAIL_LEVELS
from foreshock.measures.statistics.token_ids import TOKEN_ID_SUMS

# Tokens that are worked on at a time: their rows of numbers stay in a core's cache.
CHUNK = 512
# Chunks after which plain sums are added to the compensated ones.
CHUNKS_BETWEEN_FLUSHES = 16

# Rows of the numbers of a chunk's tokens. GROWTH is exp|d| − 1, SHRINKAGE 1 − exp(−|d|), DECAY exp(−|d|), ABOVE ρ − 1,
# TARGET and BEHAVIOUR are probabilities, SKEW is A·(ρ − 1).
LOG_TARGET, LOG_BEHAVIOUR, D, ABS_D, GROWTH, SHRINKAGE, DECAY, ABOVE, K3 = range(9)
TARGET, BEHAVIOUR, DIFFERENCE, ENTROPY, SURPRISAL, ADVANTAGE, SKEW = range(9, 16)
FLOAT_ROWS = 16
# Rows of its whole numbers. KEPT is where a measured token stood in the chunk; FINE is its bin in the histogram, CELL
# where it is scattered to.
KEPT, TURN, LAG, TOKEN_ID, FINE, CELL = range(6)
INTEGER_ROWS = 6

# How each column of the input is stored: bytes of a value, 0 where it was not logged.
OF_TARGET, OF_BEHAVIOUR, OF_MASK, OF_ENTROPY, OF_ADVANTAGE, OF_TURN, OF_LAG, OF_TOKEN_IDS = range(8)
ADVANTAGE_OF_ROLLOUTS = 8  # 1: one advantage a rollout
FORMATS = 9

# What is counted of a rollout, and of a lane.
TOKENS, GENERATED, ENTROPY_TOKENS, ADVANTAGE_TOKENS, TURNS = range(5)
ROLLOUT_COUNTS = 5
NONFINITE_TARGET, NONFINITE_BEHAVIOUR, ZERO_TOKENS, BAD_UPDATES, CHUNKS_WAITING = range(5)
LANE_COUNTS = 5

# What is known of the rollout at hand: running means of probabilities, and the turn that is open.
MEAN_TARGET, MEAN_BEHAVIOUR, MEAN_DIFFERENCE, TURN_D = range(4)
ROLLOUT_STATE = 4

# Log weights: Σρ and Σρ² of tokens where they are far from overflowing, then scaled by the largest, then of turns.
PLAIN_TOKENS, SCALED_TOKENS, SCALED_TURNS = range(3)
LARGEST, SCALED_SUM, SCALED_SQUARES = range(3)
# A chunk whose largest |d| is below this is summed plainly.
PLAIN_LIMIT = 300.0

FINE_BITS, FINE_SIZE = LOG_RATIO_GRID.bits, LOG_RATIO_GRID.size
FINE_FIRST = ((1023 + LOG_RATIO_GRID.lowest) << FINE_BITS) - 1
COARSE_BITS, COARSE_SIZE = WEIGHT_GRID.bits, WEIGHT_GRID.size
COARSE_FIRST = ((1023 + WEIGHT_GRID.lowest) << COARSE_BITS) - 1
LEVELS = len(TAIL_LEVELS)
FIRST_LEVEL = TAIL_LEVELS[0]

# The cells that tokens are scattered to, with four sums each; the last takes what belongs nowhere. A lane has all of
# them twice, for even and odd tokens.
CELL_SUMS = 4
TAIL_CELLS = 2 * COARSE_SIZE
CONDITION_CELLS: dict[str, int] = {}
_cells = TAIL_CELLS + 2 * LEVELS
for _name, _condition in CONDITIONS.items():
    CONDITION_CELLS[_name] = _cells
    _cells += _condition.size
NOWHERE = _cells
CELLS = NOWHERE + 1

PROBABILITY_CELLS, PROBABILITIES = CONDITION_CELLS["probability"], CONDITIONS["probability"].size
POSITION_CELLS, POSITIONS = CONDITION_CELLS["position"], CONDITIONS["position"].size
TURN_CELLS, TURNS_KNOWN = CONDITION_CELLS["turn"], CONDITIONS["turn"].size
LENGTH_CELLS, LENGTHS = CONDITION_CELLS["length"], CONDITIONS["length"].size
ENTROPY_CELLS, ENTROPIES = CONDITION_CELLS["entropy"], CONDITIONS["entropy"].size
LAG_CELLS, LAGS = CONDITION_CELLS["lag"], CONDITIONS["lag"].size

# A row of the table of token ids: how many tokens, then TOKEN_ID_SUMS.
ID_COLUMNS = 1 + len(TOKEN_ID_SUMS)

KEPT_VALUES = LARGEST_VALUES
# Where the largest values wait; a full buffer is cut to KEPT_VALUES.
VALUES_BUFFER = 4 * LARGEST_VALUES
PROBABILITY_GAP = DPPO_PROBABILITY_GAP

SUMS = len(TOKEN_SUMS)
SUM_D, SUM_ABS_D, SUM_D2, SUM_K3 = map(TOKEN_SUMS.index, ("d", "abs_d", "d2", "k3_kl"))
SUM_ABOVE, SUM_CHI2, SUM_REVERSE_CHI2, SUM_TV = map(
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
