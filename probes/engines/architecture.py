"""Which commands one engine can serve: those for the same model, apart from the values of its weights."""

from __future__ import annotations

import json
from pathlib import Path

from foreshock.digests import canonical_json
from foreshock_probes.engines.protocol import ScoreCommand

__all__ = ["model_key"]

# Entries of a config.json that tell who wrote it, not what the model is.
_IGNORED = ("_name_or_path", "transformers_version")


def model_key(command: ScoreCommand) -> str:
    """Return a key that is equal for commands that differ only in weights, rollouts, scorer and variant."""
    try:
        configuration = json.loads((Path(command.weights_folder) / "config.json").read_text("utf-8"))
        described = {name: value for name, value in configuration.items() if name not in _IGNORED}
    except (OSError, ValueError, AttributeError):
        described = {"digest": command.weights_digest}  # The scorer says what is wrong with it.
    return canonical_json([described, command.options, command.accelerator])
