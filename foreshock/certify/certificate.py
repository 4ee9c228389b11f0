"""The certificate: an engine against a trainer's forward pass, a row a condition, with what each verdict rests on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from foreshock.api.records import NAN, Measured, Record, parse, to_json
from foreshock.commands.command import write_output
from foreshock.errors import ConfigurationError

SCHEMA: Final = 1

Verdict = Literal["identical", "rounding", "different", "not tried"]
VERDICTS: Final[tuple[Verdict, ...]] = ("identical", "rounding", "different", "not tried")


class Prompt(Record):
    """The sums of one prompt: the tokens, and d²/2 over them, in nats²."""

    name: str
    tokens: int
    half_squares: float


class Size(Record):
    """The size of a difference d of two log-probs of the same tokens, and the floor that it is judged by."""

    dtype: Annotated[str, "precision of the engine"]
    tokens: int
    equal: Annotated[float, "share of tokens whose log-probs are equal bit for bit"]
    k3: Annotated[Measured, "mean k3 in nats, with the ends of its range over the prompts"]
    k3_low: Measured
    k3_high: Measured
    largest: Annotated[Measured, "largest |d| in nats"]
    beyond_clip: Annotated[Measured, "share of tokens whose ratio is outside 1 ± `CLIP`"]
    ess: Annotated[Measured, "effective share of sequence weights of `ESS_TOKENS` tokens, if tokens were independent"]
    half_square: Annotated[Measured, "E[d²]/2 in nats², |d| counted up to 5; its 99 % interval is over the prompts"]
    half_square_low: Measured
    half_square_high: Measured
    floor: Annotated[Measured, "E[d²]/2 up to which two right computations of these tokens may differ here"]
    steady: Annotated[Measured, "E[d²]/2 where precisions agree, at the lower end of its interval; its floor"] = NAN
    steady_floor: Measured = NAN
    repeated: Annotated[Measured, "mean d at repeated tokens less that at new ones, its end near 0; its floor"] = NAN
    repeated_floor: Measured = NAN
    prompts: tuple[Prompt, ...] = ()


CLIP: Final = 0.2
ESS_TOKENS: Final = 1000


class Row(Record):
    """A condition: what was compared, the verdict, and if it is "different", why."""

    name: str
    title: str
    verdict: Verdict
    sentence: str
    sizes: Annotated[tuple[Size, ...], "in the engine's precision, and where it was replayed, in float32"] = ()
    rollouts: Annotated[str, "digest of the tokens that were compared"] = ""
    cause: Annotated[str, "the doctor's cause, a name of its catalogue"] = ""
    why: Annotated[tuple[str, ...], "sentences: the cause, the first layer that departs, the tokens"] = ()


class Certificate(Record):
    """All rows of a model, with the fingerprints of the computations that were compared."""

    schema: int
    model: str
    model_digest: str
    architecture: str
    model_kind: str | None
    parameters: int
    engines: tuple[str, ...]
    trainer: str
    made_at: str
    seconds: float
    ended: Annotated[str, "complete, interrupted, or the budget that was spent"]
    rows: tuple[Row, ...]
    fingerprints: Mapping[str, Any] = field(default_factory=dict)
    token_sets: Annotated[Mapping[str, str], "rollouts by digest, Parquet as base64"] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row | None:
        """Return the row of a name; None if there is none."""
        return next((each for each in self.rows if each.name == name), None)


def read_certificate(path: Path) -> Certificate:
    """Return the certificate in a file. Raises ConfigurationError if it is none, or one of another schema."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is no certificate: it is not JSON ({error})") from None
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int) or "rows" not in value:
        raise ConfigurationError(f"{path} is no certificate: it lacks schema or rows")
    if value["schema"] != SCHEMA:
        raise ConfigurationError(
            f"{path} is a certificate of schema {value['schema']}; this release reads schema {SCHEMA}: make it again"
        )
    try:
        return parse(Certificate, value)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is no certificate: {error}") from None


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write the file in one piece. Raises ConfigurationError if it cannot be written; the old file is then kept."""
    write_output("--out", path, json.dumps(to_json(certificate), ensure_ascii=False, allow_nan=False, indent=1))
