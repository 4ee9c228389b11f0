"""The words and the table cells of a backtest."""

from foreshock.backtest.scoring import ALL_WARNINGS, BacktestResult, RunResult, Score

SCORE_HEADER = (
    "rule", "hits", "95 %", "lead", "false/armed", "per 1,000", "95 %", "healthy time in alarm", "95 % over runs",
)  # fmt: skip


def answer_in_words(result: BacktestResult) -> list[str]:
    """Return what the warnings are worth on these runs: collapses found, false alarms, and the learning rate lost."""
    found = next(each for each in result.rules if each.rule == ALL_WARNINGS)
    usable, healthy = found.hits + found.misses, [each for each in result.runs if each.run.collapse is None]
    lead = "" if found.median_lead is None else f", {found.median_lead:g} steps before in the median"
    unusable = sum(each.run.collapse is not None for each in result.runs) - usable
    left_out = f" ({unusable} more came too early to be judged)" if unusable else ""
    low, high = found.false_alarms_per_1000_interval
    rate = f"{found.false_alarms_per_1000:.2g} per 1,000 (95 %: {low:.2g} to {high:.2g})"
    taken = max((each.lost for each in healthy), default=0.0)
    return [
        f"{found.hits} of {usable} collapses warned of{lead}{left_out}."
        if usable
        else f"No collapse that could be warned of{left_out}.",
        f"{found.false_alarms} false alarms in {found.armed_observations:,} watched steps: {rate}.",
        f"Under apply, a run without a collapse would have lost at most {100 * taken:.1f} % of Σ η.",
    ]


RUN_HEADER = ("run", "steps", "collapse", "Σ η lost under apply", "alarms")


def run_cells(result: RunResult) -> list[str]:
    run = result.run
    collapse = "none" if run.collapse is None else f"{run.collapse}{'' if run.usable else ', no baseline: unusable'}"
    alarms = ", ".join(f"{each.rule}@{each.start}" for each in run.episodes)
    return [run.name, str(len(run.steps)), collapse, f"{100 * result.lost:.1f} %", alarms or "none"]


def score_cells(score: Score) -> list[str]:
    low, high = score.false_alarms_per_1000_interval
    first, last = score.hit_rate_interval
    least, most = score.healthy_share_in_alarm_interval
    lead, collapses = score.median_lead, score.hits + score.misses
    return [
        score.rule,
        f"{score.hits}/{collapses}",
        f"{100 * first:.0f}-{100 * last:.0f} %" if collapses else "–",
        "–" if lead is None else f"{lead:g} ({min(score.leads)}-{max(score.leads)})",
        f"{score.false_alarms}/{score.armed_observations}",
        f"{score.false_alarms_per_1000:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{100 * score.healthy_share_in_alarm:.1f} %",
        f"{100 * least:.1f}-{100 * most:.1f} %",
    ]
