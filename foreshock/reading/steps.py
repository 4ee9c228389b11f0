"""The methods of readers about one step: its tokens, lint, corrections and theory, and what replays of it found."""

# mypy: disable-error-code="empty-body"

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from foreshock.api.attribution import AttributionRecord
from foreshock.api.doctor import DoctorStepRecord
from foreshock.api.replays import ExactStepRecord, ExactTokensRecord
from foreshock.api.steps import CorrectionsRecord, LintRecord, TheoryRecord
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.update_noise import UpdateToNoise
from foreshock.layer_divergence import LayerComparison
from foreshock.reading.columns import Buckets, TokenIds, Tokens
from foreshock.reading.described import get
from foreshock.routing import RoutingComparison

Condition = Literal["probability", "position", "turn", "length", "entropy", "lag"]


def _routing(value: Mapping[str, Any]) -> tuple[RoutingComparison, ...]:
    return tuple(map(RoutingComparison.from_dict, value["items"]))


def _layers(value: Mapping[str, Any]) -> tuple[LayerComparison, ...]:
    return tuple(LayerComparison.from_dict({**item, "step": value["step"]}) for item in value["items"])


class StepMethods:
    """The methods of both readers about one step."""

    @get("/v1/runs/{run}/steps/{step}/buckets")
    def buckets(
        self,
        run: str,
        step: int,
        *,
        by: Condition = "probability",
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> Buckets:
        """Return the mismatch of a step in buckets of a condition of its tokens."""

    @get("/v1/runs/{run}/steps/{step}/buckets", fixed=[("by", "token_id")])
    def token_ids(
        self,
        run: str,
        step: int,
        *,
        limit: int | None = None,
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> TokenIds:
        """Return the mismatch of a step by token id; `limit` is the largest number of ids."""

    @get("/v1/runs/{run}/steps/{step}/tokens", count="worst")
    def worst_tokens(
        self, run: str, step: int, *, count: int = 20, comparison: str = TRAINER_ROLLOUT, attempt: int | None = None
    ) -> Tokens:
        """Return the tokens of a step with the largest |d|, at most 1,000."""

    @get("/v1/runs/{run}/steps/{step}/tokens")
    def rollout_tokens(
        self,
        run: str,
        step: int,
        sample_id: str,
        *,
        from_position: int = 0,
        to_position: int | None = None,
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> Tokens:
        """Return one rollout token by token, from one position of the response to another (included)."""

    @get("/v1/runs/{run}/steps/{step}/rollouts")
    def export_rollouts(self, run: str, step: int, *, attempt: int | None = None) -> bytes:
        """Return the bytes of a Parquet file with every stored rollout of a step, a row each, in the rollout table."""

    @get("/v1/runs/{run}/steps/{step}/exact/tokens", count="worst")
    def exact_tokens(
        self,
        run: str,
        step: int,
        *,
        pair: str | None = None,
        count: int = 20,
        sample_id: str | None = None,
        from_position: int = 0,
        to_position: int | None = None,
        attempt: int | None = None,
    ) -> ExactTokensRecord:
        """Return the tokens with the largest KL(μ‖π), at most 1,000, or those of the rollout `sample_id`.

        Of a rollout, from one position of the response to another (included). `pair` is one that `exact` returned;
        None: the service's default.
        """

    @get("/v1/runs/{run}/steps/{step}/lint")
    def lint(self, run: str, step: int, *, attempt: int | None = None) -> LintRecord:
        """Return the lint of a step's log-probs: named warnings with evidence, and the checks that were made."""

    @get("/v1/runs/{run}/steps/{step}/corrections", names="correction", thresholds="threshold")
    def corrections(
        self,
        run: str,
        step: int,
        *,
        names: Sequence[str] = (),
        thresholds: Sequence[str] = (),
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> CorrectionsRecord:
        """Return the effect of corrections on a step: kept tokens, variance, distortion. No names: all of them.

        `thresholds`, such as "2" or "0.5_5", are of the one correction that is named; none: the usual ones.
        """

    @get("/v1/runs/{run}/steps/{step}/theory")
    def theory(
        self,
        run: str,
        step: int,
        *,
        delta_max: float | None = None,
        gradient_bound: float | None = None,
        comparison: str = TRAINER_ROLLOUT,
        attempt: int | None = None,
    ) -> TheoryRecord:
        """Return bounds on the bias of a step's gradient, and the cost of its noise at η and η/2.

        `delta_max` is the largest exact total variation, `gradient_bound` an upper bound of ‖∇log π‖ of one token.
        """

    @get("/v1/runs/{run}/steps/{step}/attribution")
    def attribution(self, run: str, step: int, *, attempt: int | None = None) -> AttributionRecord:
        """Return the causes of a step's mismatch. Raises Rejected (404) if no scores of the step are published."""

    @get("/v1/runs/{run}/steps/{step}/exact")
    def exact(self, run: str, step: int, *, attempt: int | None = None) -> ExactStepRecord:
        """Return the exact divergences of a step's pairs. Raises Rejected (404) if none are published."""

    @get("/v1/runs/{run}/steps/{step}/routing", read=_routing)
    def routing(self, run: str, step: int, *, attempt: int | None = None) -> tuple[RoutingComparison, ...]:
        """Return the newest comparisons of routed experts of a step. Raises Rejected (404) if none are published."""

    @get("/v1/runs/{run}/steps/{step}/layers", read=_layers)
    def layers(
        self, run: str, step: int, *, attempt: int | None = None, pair: str | None = None
    ) -> tuple[LayerComparison, ...]:
        """Return the newest comparison by layer of each pair of scorers of a step, or of one `compared/reference`.

        Raises Rejected (404) if none are published.
        """

    @get("/v1/runs/{run}/steps/{step}/update")
    def update(self, run: str, step: int, *, attempt: int | None = None) -> UpdateToNoise:
        """Return the newest measurement of a step's update. Raises Rejected (404) if none is done."""

    @get("/v1/runs/{run}/steps/{step}/doctor")
    def doctor(self, run: str, step: int, *, attempt: int | None = None) -> DoctorStepRecord:
        """Return the newest report of the doctor on a step. Raises Rejected (404) if it was not examined."""
