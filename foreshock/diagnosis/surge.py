"""The online detector of the length surge: the first confirmed crossing of twice the baseline, in a steep rise.

Before a collapse the mean response length multiplies within some tens of steps. The baseline is the median length
before the growth window, so slow growth enters it and only a steep rise is a surge. The surge step is the step of the
confirmed crossing, not the step of its confirmation: a late surge step lets the run collapse, an early one only slows
it down, so the detector prefers an early one.

A crossing is confirmed if it holds, if its evidence (`statistics.py`, with the run's own autocorrelated noise) is
beyond the average run length of the settings, and if it is steeper than a ramp or a mismatch, gradient or reward rule
fires with it. Guards against false surges: the crossing must exceed the highest smoothed length before the growth
window, so a return to earlier lengths is no surge; lengths that have been at their cap disarm the detector; a surge
within the first steps affects the learning rate only if a mismatch, gradient or reward rule corroborates it; the same
holds for a surge with a rising reward.

All computations use log lengths and step numbers, so missing steps and runs logged every tenth step work.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import replace
from statistics import median

from foreshock.diagnosis.statistics import (
    Noise,
    autocorrelated_noise,
    log_evidence,
    onset_of,
    residuals_above,
    slope_of,
)
from foreshock.diagnosis.surge_state import (
    Crossing,
    StepLengths,
    SurgeDetection,
    SurgeKind,
    SurgeSettings,
    SurgeState,
    is_armed,
)
from foreshock.json_values import finite_or_none

_KEPT_VALUES = 64
"""Number of newest values that are kept, however far apart their steps are."""

_STEADY_VALUES = (2, 5, 10, 20)
"""Values of an earlier stretch: few for an early surge or sparse steps, many for noisy lengths."""


def advance_surge(
    state: SurgeState, step: int, lengths: StepLengths, corroborated: bool, settings: SurgeSettings
) -> tuple[SurgeState, tuple[SurgeDetection, ...]]:
    """Return the state after ``step`` and the detections at it.

    ``corroborated`` is true if a mismatch, gradient or reward rule is firing at this step.
    """
    detection: SurgeDetection | None = None
    mean, reward = finite_or_none(lengths.mean), finite_or_none(lengths.reward)
    if mean is None or mean < 0.0:
        state = replace(state, missing=state.missing + 1)
    else:
        # Clamp at one token: log(0) is not finite.
        value = math.log(max(mean, 1.0))
        state = _observe_cap(state, mean, lengths, settings)
        state, confirmed = _advance_crossing(state, step, value, reward, corroborated, settings)
        if state.capped < settings.capped_values:
            state = _remember(state, step, value, reward, settings)
        if confirmed is not None:
            detection = _detection_of(state, step, value, confirmed, lengths, corroborated, settings)
            state = _after(state, step, confirmed, detection, settings)
        else:
            state, detection = _advance_ramp(state, step, settings)
    state, late = _corroborate(state, step, corroborated, settings)
    return state, tuple(each for each in (detection, late) if each is not None)


def _observe_cap(state: SurgeState, mean: float, lengths: StepLengths, settings: SurgeSettings) -> SurgeState:
    """Learn the cap from truncated responses, and count the values at it in a row."""
    truncated, longest = finite_or_none(lengths.truncated), finite_or_none(lengths.longest)
    cap = state.cap
    if truncated is not None and truncated > 0.0 and longest is not None:
        # A truncated response is as long as the cap; a cap that was raised replaces the old one.
        cap = longest
    at_cap = (truncated is not None and truncated >= settings.truncated_at_cap) or (
        cap is not None and mean >= settings.fraction_of_cap * cap
    )
    return replace(state, cap=cap, capped=state.capped + 1 if at_cap else 0)


def _advance_crossing(
    state: SurgeState, step: int, value: float, reward: float | None, corroborated: bool, settings: SurgeSettings
) -> tuple[SurgeState, Crossing | None]:
    """Open, abandon or confirm a crossing; return the state and the confirmed crossing.

    Lengths alone do not distinguish a slow surge from a ramp; a rule that fires at the same time does.
    """
    crossing = state.crossing
    if crossing is None:
        if not is_armed(state, settings):
            return state, None
        if state.armed_since is None:
            state = replace(state, armed_since=step)
        return replace(state, crossing=_opened(state, step, value, reward, settings)), None
    crossing = replace(
        crossing,
        rising_steps=(*crossing.rising_steps, step),
        rising=(*crossing.rising, value),
        since=(*crossing.since, value),
        rewards_since=crossing.rewards_since if reward is None else (*crossing.rewards_since, reward),
    )
    count = len(crossing.since)
    if count >= settings.abandoning_values and median(crossing.since) < crossing.threshold:
        return replace(state, crossing=None), None
    if count >= settings.confirmation_values:
        noise = _noise(crossing, settings)
        if _holds(crossing, noise, settings) and (corroborated or _is_steep(state, crossing, noise, settings)):
            return replace(state, crossing=None), crossing
    return replace(state, crossing=None if count >= settings.maximum_crossing_values else crossing), None


def _opened(
    state: SurgeState, step: int, value: float, reward: float | None, settings: SurgeSettings
) -> Crossing | None:
    """Return the crossing that a value opens, None if it opens none."""
    if state.last_confirmed_step is not None and step <= state.last_confirmed_step + settings.quiet_steps:
        return None
    if value < min(state.values) + settings.log_growth:
        return None
    first, last = _baseline_range(state, step, settings)
    baseline = median(state.values[first:last])
    threshold = baseline + settings.log_growth
    if value < threshold:
        return None
    # Extrapolate a steady drift from before the baseline: from the middle of the baseline to this value.
    earlier = state.values[max(first - settings.noise_values, 0) : first]
    growth = max(slope_of(earlier), 0.0) if len(earlier) >= settings.drift_values else 0.0
    drift = growth * (len(state.values) - 0.5 * (first + last))
    threshold = max(threshold + min(drift, settings.largest_drift), _high_water(state, last, settings))
    if value < threshold:
        return None
    return Crossing(
        step=step,
        baseline=baseline,
        baseline_values=last - first,
        threshold=threshold,
        before=state.values[max(last - settings.noise_values, 0) : last],
        # With the value before the growth window, which the first residual needs.
        rising_steps=(*state.steps[last - 1 :], step),
        rising=(*state.values[last - 1 :], value),
        since=(value,),
        rewards_before=tuple(each for each in state.rewards[first:last] if each is not None),
        rewards_since=() if reward is None else (reward,),
    )


def _baseline_range(state: SurgeState, step: int, settings: SurgeSettings) -> tuple[int, int]:
    """Return the range of the kept values before the growth window, over a span as long as the window."""
    window = settings.window(step)
    before = bisect_right(state.steps, step - window)
    span = before - bisect_left(state.steps, step - 2 * window)
    last = max(before, settings.baseline_values)
    return last - max(span, settings.baseline_values), last


def _high_water(state: SurgeState, last: int, settings: SurgeSettings) -> float:
    """Return the highest smoothed log length of the values before the growth window, which begins at index ``last``."""
    before = -math.inf if state.high_water is None else state.high_water
    count = settings.smoothing_values
    return max([before, *(median(state.values[end - count : end]) for end in range(count, last + 1))])


def _noise(crossing: Crossing, settings: SurgeSettings) -> Noise:
    """Return the noise of the values before the growth window and, if enough, since the crossing, each with its own
    level."""
    segments = [crossing.before]
    if len(crossing.since) >= settings.baseline_values:
        segments.append(crossing.since)
    return autocorrelated_noise(segments, settings.least_noise)


def _residuals(crossing: Crossing, noise: Noise) -> list[float]:
    return residuals_above(crossing.rising, crossing.baseline, crossing.baseline_values, noise)


def _holds(crossing: Crossing, noise: Noise, settings: SurgeSettings) -> bool:
    """Return whether a crossing is beyond the wander of the series, and its evidence beyond the run length."""
    wander = math.hypot(noise.deviation_of_mean(len(crossing.since)), noise.deviation_of_mean(crossing.baseline_values))
    if median(crossing.since) - crossing.baseline < settings.rise_z * wander:
        return False
    return log_evidence(_residuals(crossing, noise)) >= math.log(settings.average_run_length)


def _is_steep(state: SurgeState, crossing: Crossing, noise: Noise, settings: SurgeSettings) -> bool:
    """Return whether the lengths have doubled faster than a ramp could, beyond the noise.

    The newest values, at most those since the crossing, are compared with every earlier stretch of values. The two
    means must differ by a doubling, and by some standard errors more than a ramp of the largest rate rises between
    their centres.
    """
    rate = settings.ramp_rate * min(1.0, settings.late_step / crossing.step)
    # Values at a cap are stored only in the crossing.
    known = bisect_left(state.steps, crossing.rising_steps[0])
    steps = (*state.steps[:known], *crossing.rising_steps)
    values = (*state.values[:known], *crossing.rising)
    count = len(values)
    sums = [0.0]
    places = [0]
    for step, value in zip(steps, values, strict=True):
        sums.append(sums[-1] + value)
        places.append(places[-1] + step)
    for after in range(2, len(crossing.since) + 1, 2):
        mean = (sums[count] - sums[count - after]) / after
        centre = (places[count] - places[count - after]) / after
        of_after = noise.deviation_of_mean(after)
        for before in _STEADY_VALUES:
            error = math.hypot(of_after, noise.deviation_of_mean(before))
            for end in range(count - after, before - 1, -1):
                risen = mean - (sums[end] - sums[end - before]) / before
                distance = centre - (places[end] - places[end - before]) / before
                if distance > settings.maximum_window:
                    break
                margin = risen - rate * distance
                if risen >= settings.log_growth and margin >= settings.steep_z * error:
                    return True
    return False


def _remember(state: SurgeState, step: int, value: float, reward: float | None, settings: SurgeSettings) -> SurgeState:
    steps, values, rewards = (*state.steps, step), (*state.values, value), (*state.rewards, reward)
    oldest = step - 2 * settings.maximum_window
    drop = min(bisect_left(steps, oldest), max(len(steps) - _KEPT_VALUES, 0))
    high = state.high_water
    if drop:
        level = median(values[: drop + settings.smoothing_values - 1][-settings.smoothing_values :])
        high = level if high is None else max(high, level)
    state = replace(state, steps=steps[drop:], values=values[drop:], rewards=rewards[drop:], high_water=high, missing=0)
    if state.anchor is None and len(values) >= settings.smoothing_values:
        return _anchored(state, step, settings)
    return state


def _anchored(state: SurgeState, step: int, settings: SurgeSettings) -> SurgeState:
    """Return the state with the newest level as the fixed baseline of ramps; without any value it has none."""
    newest = state.values[-settings.smoothing_values :]
    reward = _reward(state, settings)
    return replace(state, anchor=median(newest) if newest else None, anchor_step=step, anchor_reward=reward)


def _reward(state: SurgeState, settings: SurgeSettings) -> float | None:
    known = [each for each in state.rewards[-settings.smoothing_values :] if each is not None]
    return median(known) if known else None


def _detection_of(
    state: SurgeState,
    step: int,
    value: float,
    crossing: Crossing,
    lengths: StepLengths,
    corroborated: bool,
    settings: SurgeSettings,
) -> SurgeDetection:
    noise = _noise(crossing, settings)
    residuals = _residuals(crossing, noise)
    evidence = log_evidence(residuals)
    onset = onset_of(residuals)
    kind: SurgeKind = "surge"
    effective = True
    if state.effective_surge_step is not None:
        kind, effective = "surge_again", False
    elif not corroborated and _rises_with_reward(crossing, settings):
        kind, effective = "growth_with_reward", False
    elif crossing.step <= settings.early_surge_step:
        kind, effective = "early_surge", corroborated
    steps = crossing.rising_steps[1:]
    # The steps since the detector was first armed: an upper bound of the observations that it has tested.
    armed_steps = 1 if state.armed_since is None else step - state.armed_since + 1
    return SurgeDetection(
        kind=kind,
        step=step,
        surge_step=_surge_step(crossing, settings),
        length=_tokens(value),
        baseline=_tokens(crossing.baseline),
        noise=noise.deviation,
        autocorrelation=noise.autocorrelation,
        effective=effective,
        onset=steps[onset.index],
        onset_first=steps[onset.first],
        onset_last=steps[onset.last],
        log_evidence=evidence,
        confidence=max(0.0, 1.0 - armed_steps * math.exp(-evidence)),
        truncated=finite_or_none(lengths.truncated),
        reward_change=_reward_change(crossing),
    )


def _surge_step(crossing: Crossing, settings: SurgeSettings) -> int:
    """Return the first step of the growth window from which the values hold twice the baseline.

    It may be before the crossing: noise may have interrupted an earlier crossing, and a rise that is longer than the
    growth window contains its baseline, so the level before the baseline counts too. An early surge step is preferred.
    """
    earlier = crossing.before[-3 * crossing.baseline_values : -crossing.baseline_values]
    baseline = crossing.baseline
    if len(earlier) >= settings.baseline_values:
        baseline = min(baseline, median(earlier))
    threshold = baseline + settings.log_growth
    for index in range(1, len(crossing.rising)):
        step = crossing.rising_steps[index]
        if step >= crossing.step:
            break
        held = crossing.rising[index:]
        if held[0] >= threshold and median(held) >= threshold:
            return step
    return crossing.step


def _reward_change(crossing: Crossing) -> float | None:
    if not crossing.rewards_before or not crossing.rewards_since:
        return None
    return median(crossing.rewards_since) - median(crossing.rewards_before)


def _rises_with_reward(crossing: Crossing, settings: SurgeSettings) -> bool:
    """Return whether the reward since the crossing is higher than at the baseline, beyond its own noise."""
    change = _reward_change(crossing)
    if change is None:
        return False
    before, since = crossing.rewards_before, crossing.rewards_since
    noise = autocorrelated_noise([before, since])
    error = math.hypot(noise.deviation_of_mean(len(before)), noise.deviation_of_mean(len(since)))
    return change > settings.reward_z * error


def _after(
    state: SurgeState, step: int, crossing: Crossing, detection: SurgeDetection, settings: SurgeSettings
) -> SurgeState:
    """Return the state after a confirmed crossing: the baseline of the next surge is the length of this one."""
    high = _high_water(state, len(state.values), settings)
    known = bisect_left(state.steps, crossing.step)
    waits = detection.kind in ("early_surge", "growth_with_reward") and not detection.effective
    after = replace(
        state,
        steps=state.steps[known:],
        values=state.values[known:],
        rewards=state.rewards[known:],
        high_water=None if high == -math.inf else high,
        last_confirmed_step=step,
        pending=detection if waits else state.pending,
        effective_surge_step=detection.surge_step if detection.effective else state.effective_surge_step,
    )
    return _anchored(after, step, settings)


def _advance_ramp(state: SurgeState, step: int, settings: SurgeSettings) -> tuple[SurgeState, SurgeDetection | None]:
    """Report a doubling that took longer than the growth window, and move the fixed baseline up to it."""
    if state.anchor is None or state.crossing is not None or len(state.values) < 2 * settings.smoothing_values:
        return state, None
    level = median(state.values[-settings.smoothing_values :])
    if state.last_confirmed_step is not None and step <= state.last_confirmed_step + settings.quiet_steps:
        # The rest of a surge's own rise is not a ramp.
        return replace(state, anchor=max(state.anchor, level)), None
    if level < state.anchor + settings.log_growth or step <= state.anchor_step + settings.window(step):
        return state, None
    _, last = _baseline_range(state, step, settings)
    noise = autocorrelated_noise([state.values[-settings.noise_values :]], settings.least_noise)
    needed = max(settings.log_growth, settings.rise_z * noise.deviation_of_mean(2 * settings.smoothing_values))
    level = median(state.values[-2 * settings.smoothing_values :])
    if level < max(state.anchor + needed, _high_water(state, last, settings)):
        return state, None
    reward = _reward(state, settings)
    detection = SurgeDetection(
        kind="ramp",
        step=step,
        surge_step=step,
        length=_tokens(level),
        baseline=_tokens(state.anchor),
        noise=noise.deviation,
        autocorrelation=noise.autocorrelation,
        effective=False,
        onset=state.anchor_step,
        onset_first=state.anchor_step,
        onset_last=step,
        reward_change=None if reward is None or state.anchor_reward is None else reward - state.anchor_reward,
    )
    return replace(state, anchor=level, anchor_step=step, anchor_reward=reward), detection


def _tokens(log_length: float) -> float:
    """Return exp(log_length) rounded to 10 digits: 50, not 49.99999999999999."""
    return float(f"{math.exp(log_length):.10g}")


def _corroborate(
    state: SurgeState, step: int, corroborated: bool, settings: SurgeSettings
) -> tuple[SurgeState, SurgeDetection | None]:
    """Make a pending surge effective if it is corroborated; drop it when its time is over."""
    pending = state.pending
    if pending is None:
        return state, None
    if state.effective_surge_step is not None or step > pending.step + settings.corroboration_steps:
        return replace(state, pending=None), None
    if not corroborated:
        return state, None
    detection = replace(pending, kind="surge", step=step, effective=True)
    return replace(state, pending=None, effective_surge_step=pending.surge_step), detection
