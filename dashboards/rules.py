"""The alert rules of Prometheus, written to `prometheus/rules.yml`. Thresholds come from `foreshock.healthy_ranges`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.healthy_ranges import required_range, threshold_number
from foreshock.model_kind import MODEL_KIND_NAMES, MODEL_KINDS, ModelKind
from foreshock.severity import Severity

HEADER = """\
# Written by `python -m dashboards.generate` from dashboards/rules.py; change it there.
# These alerts page a person. They never move a learning rate: the service's detectors do that, which know the run's own
# baseline and noise. Ranges hold at lag 0, so that the metrics compared with them are those of lag 0; a run whose model
# kind is unknown is judged as a dense model.
"""

# The metrics carry a run's id; people know its key and its project.
_NAMED = "* on (run) group_left (key, project) foreshock_run_info"
_RUN = "Run {{ $labels.key }} of {{ $labels.project }}"
_VALUE = '{{ $value | printf "%.2g" }}'
_PAGE = (
    '{{ with query "foreshock_build_info" }}{{ . | first | label "public_url" }}{{ end }}'
    '/runs/{{ $labels.project | urlquery | reReplaceAll "[+]" "%20" }}'
    '/{{ $labels.key | urlquery | reReplaceAll "[+]" "%20" }}'
)
_PROBE = "Save a checkpoint, then `foreshock probe RUN STEP` names the part that differs."
# What the service's own rules compare with the ranges: without a sample if a step has too few tokens at lag 0.
_K3 = "foreshock_lag_zero_k3_kl_nats"
_TAIL = "foreshock_lag_zero_tail_2_ratio"
_QUIETEST = f"run_comparison:{_K3}:min_over_time6h"


@dataclass(frozen=True, slots=True)
class AlertRule:
    """An alert of Prometheus. `wait` is how long the expression must hold, such as "5m"; None: it fires at once.

    `model_kind` is a label of rules whose threshold depends on the kind of model. `of_run`: it is about one run, whose
    key, project and page the alert carries.
    """

    name: str
    expression: str
    severity: Severity
    summary: str
    description: str
    wait: str | None = None
    comment: str | None = None
    model_kind: ModelKind | None = None
    of_run: bool = True

    def render(self) -> str:
        """Return the rule as YAML; every string is written as JSON, which is YAML."""
        lines = [f"- alert: {self.name}"]
        if self.comment is not None:
            lines.append(f"  # {self.comment}")
        named = f"({textwrap.indent(self.expression, ' ').lstrip()})\n{_NAMED}"
        lines += ["  expr: |", textwrap.indent(named if self.of_run else self.expression, "    ")]
        if self.wait is not None:
            lines.append(f"  for: {self.wait}")
        lines += ["  labels:", f"    severity: {self.severity}"]
        if self.model_kind is not None:
            lines.append(f"    model_kind: {self.model_kind}")
        lines.append("  annotations:")
        lines += [f"    {key}: {_quoted(text)}" for key, text in self._annotations()]
        return "\n".join(lines)

    def _annotations(self) -> tuple[tuple[str, str], ...]:
        own = (("summary", self.summary), ("description", self.description))
        return (*own, ("url", _PAGE)) if self.of_run else own


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded expression."""

    name: str
    expression: str

    def render(self) -> str:
        """Return the recording as YAML."""
        return f"- record: {self.name}\n  expr: {self.expression}"


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated together."""

    name: str
    rules: Sequence[AlertRule | Recording]

    def render(self) -> str:
        """Return the group as YAML."""
        rules = "\n\n".join(textwrap.indent(rule.render(), "      ") for rule in self.rules)
        return f"  - name: {self.name}\n    rules:\n{rules}"


def rules_file() -> str:
    """Return the text of rules.yml."""
    return f"{HEADER}groups:\n" + "\n\n".join(group.render() for group in groups()) + "\n"


def groups() -> tuple[Group, ...]:
    """Return every group of rules."""
    return (
        Group("foreshock_recorded", (Recording(_QUIETEST, f"min_over_time({_K3}[6h])"),)),
        Group("foreshock_mismatch", _mismatch()),
        Group("foreshock_run", _run()),
        Group("foreshock_service", _service()),
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _of_trainer(metric: str) -> str:
    return f'{metric}{{comparison="{TRAINER_ROLLOUT}"}}'


def _of_kind(expression: str, kind: ModelKind) -> str:
    """Return the expression for the runs of a kind of model; runs of an unknown kind are judged as dense."""
    mixtures = 'on (run) foreshock_run_info{model_kind="moe"}'
    return f"{expression}\n  {'and' if kind == 'moe' else 'unless'} {mixtures}"


def _mismatch_of_kind(kind: ModelKind) -> tuple[AlertRule, ...]:
    k3 = required_range("k3_kl", kind)
    assert k3.warning is not None
    assert k3.critical is not None
    value = f"k3 of {TRAINER_ROLLOUT} at lag 0 is {_VALUE} nats per token; "
    healthy = f"{k3.healthy} is healthy for a {MODEL_KIND_NAMES[kind]}."
    metric = _of_trainer(_K3)
    return (
        AlertRule(
            "ForeshockMismatchCritical",
            _of_kind(f"{metric} > {threshold_number(k3.critical)}", kind),
            "critical",
            f"{_RUN}: the mismatch of trainer and engine is critical",
            f"{value}{healthy} {_PROBE}",
            wait="5m",
            model_kind=kind,
        ),
        AlertRule(
            "ForeshockMismatchWarning",
            _of_kind(f"{metric} > {threshold_number(k3.warning)}", kind),
            "warning",
            f"{_RUN}: the mismatch is above its healthy range",
            f"{value}{healthy} {_PROBE}",
            wait="15m",
            model_kind=kind,
        ),
    )


def _growing_of_kind(kind: ModelKind) -> AlertRule:
    k3, smallest = _of_trainer(_K3), required_range("k3_kl", kind).warning
    assert smallest is not None
    return AlertRule(
        "ForeshockMismatchGrowing",
        _of_kind(f"{k3}\n  > 10 * {_of_trainer(_QUIETEST)}\nand {k3} > {threshold_number(smallest / 10)}", kind),
        "warning",
        f"{_RUN}: the mismatch is ten times what it was",
        f"k3 of {TRAINER_ROLLOUT} at lag 0 has risen to {_VALUE} nats per token, ten times its "
        f"lowest value of the last six hours. {_PROBE}",
        wait="10m",
        comment="Relative to the run's own lowest value of six hours, and not below a tenth of the healthy range.",
        model_kind=kind,
    )


def _mismatch() -> tuple[AlertRule, ...]:
    tail = required_range("tail_2")
    return (
        *(rule for kind in MODEL_KINDS for rule in _mismatch_of_kind(kind)),
        *(_growing_of_kind(kind) for kind in MODEL_KINDS),
        AlertRule(
            "ForeshockMismatchRisen",
            'foreshock_alerts_open{rule="mismatch_rise"} > 0',
            "warning",
            f"{_RUN}: the mismatch is above the run's own baseline",
            f"The service has an open alert of this rule, which compares k3 at each lag with the baseline of that lag. "
            f"The run's page says at which lags. {_PROBE}",
            comment="For runs without tokens at lag 0 too, whose k3 has no range.",
        ),
        AlertRule(
            "ForeshockTailHeavy",
            f"{_of_trainer(_TAIL)} > {tail.critical}",
            "critical",
            f"{_RUN}: π and μ differ by more than a factor of 2 at many tokens",
            f"{{{{ $value | humanizePercentage }}}} of the tokens have a ratio beyond 2; "
            f"above {100 * (tail.critical or 0):g}% is dangerous. {_PROBE}",
            wait="5m",
        ),
        AlertRule(
            "ForeshockNonFiniteLogProbs",
            "foreshock_nonfinite_log_probs > 0",
            "warning",
            f"{_RUN}: log-probs are not finite",
            "{{ $value }} log-probs of the newest step are NaN or infinite. They are left out of every mean. Find the "
            "sampler or mask that produces them.",
        ),
    )


def _run() -> tuple[AlertRule, ...]:
    truncated = required_range("truncated_fraction")
    return (
        AlertRule(
            "ForeshockRunSilent",
            "time() - foreshock_last_ingest_timestamp_seconds > 1800",
            "warning",
            f"{_RUN}: no data for {{{{ $value | humanizeDuration }}}}",
            "The trainer has stopped, or its client cannot reach the service and spools to disk. Check the trainer, "
            "then its client's log.",
            wait="1m",
            comment="Finished and deleted runs are not exported, so this alert resolves by itself.",
        ),
        AlertRule(
            "ForeshockResponsesTruncated",
            f"foreshock_truncated_ratio > {truncated.warning}",
            "warning",
            f"{_RUN}: {{{{ $value | humanizePercentage }}}} of the responses are cut at the length cap",
            "The mean length cannot show a surge while many responses are cut. Raise the cap, or read the quantiles.",
            wait="15m",
        ),
        AlertRule(
            "ForeshockAlertOpen",
            'foreshock_alerts_open{severity="critical"} > 0',
            "critical",
            f"{_RUN}: the rule {{{{ $labels.rule }}}} has fired",
            "The service has {{ $value }} open alert(s) of this rule. The run's page gives the reason and what to do.",
        ),
        AlertRule(
            "ForeshockRewardCollapsed",
            "foreshock_reward_collapsed == 1",
            "critical",
            f"{_RUN}: the reward has collapsed",
            "The run's page says since when, what came first, and what to do.",
        ),
        AlertRule(
            "ForeshockAdviceNotFollowed",
            "((foreshock_advice_revision > foreshock_advice_acknowledged_revision)\n"
            "  or (foreshock_advice_revision > 0 unless on (run) foreshock_advice_acknowledged_revision))\n"
            'and on (run) foreshock_advice_mode{mode="apply"} == 1',
            "warning",
            f"{_RUN}: the trainer does not follow the learning-rate advice",
            "Revision {{ $value }} of the advice is half an hour old, and the trainer has acknowledged an older one or "
            "none. Check that it polls the advice and applies the scale.",
            wait="30m",
            comment="Only in mode `apply` does a trainer follow the advice.",
        ),
    )


def _service() -> tuple[AlertRule, ...]:
    return (
        AlertRule(
            "ForeshockDown",
            'up{job="foreshock"} == 0 or absent(up{job="foreshock"})',
            "critical",
            "The Foreshock service does not answer",
            "Trainers continue and spool to disk. Nothing is measured and no advice changes until the service is back.",
            wait="2m",
            of_run=False,
        ),
        AlertRule(
            "ForeshockExporterCutsRuns",
            "foreshock_exporter_runs_cut > 0",
            "info",
            "{{ $value }} running run(s) are not exported",
            "More runs are active than FORESHOCK_EXPORTER_MAX_RUNS allows; those with the newest data are exported.",
            of_run=False,
        ),
        AlertRule(
            "ForeshockProbesWaiting",
            "foreshock_probe_job_oldest_waiting_seconds > 3600",
            "warning",
            "Probe jobs for accelerator {{ $labels.accelerator }} wait for a worker",
            "The oldest job has waited for {{ $value | humanizeDuration }}. Start a worker with that accelerator and "
            "the scorers of the job.",
            of_run=False,
        ),
        AlertRule(
            "ForeshockProbeJobsFailing",
            "increase(foreshock_probe_job_failures_total[1h]) > 3",
            "warning",
            "Probe jobs for accelerator {{ $labels.accelerator }} fail",
            "{{ $value | humanize }} tries failed in the last hour. GET /v1/probes/{probe} gives the reasons.",
            of_run=False,
        ),
    )
