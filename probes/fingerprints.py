"""Fingerprints of scores: of the process that scores, with the request's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreshock.fingerprint import Fingerprint
from foreshock.process_fingerprint import process_fingerprint
from foreshock_probes.engines.environment import EngineEnvironment

if TYPE_CHECKING:
    import torch

    from foreshock_probes.scorers.request import ScoreRequest

__all__ = ["score_fingerprint"]


def score_fingerprint(
    request: ScoreRequest, engine: str, device: torch.device, *, flags: dict[str, str], **known: Any
) -> Fingerprint:
    """Return the fingerprint of a score of `engine` on `device`; the scorer gives the fields in `known`.

    At temperature 1 without truncation, raw and processed log-probs are equal; the mode is then raw.
    """
    return process_fingerprint(
        engine,
        device,
        flags=flags,
        held_by=EngineEnvironment.of_variables().variables(),
        logprobs_mode="raw_logprobs" if known.get("temperature") == 1.0 else "processed_logprobs",
        weights_version=request.weights_version,
        weights_digest=request.weights_digest,
        **known,
    )
