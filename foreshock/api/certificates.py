"""The answers on certificates; the certificate itself is that of `foreshock.certify`."""

from collections.abc import Mapping
from typing import Annotated

from foreshock.api.records import Record


class CertificateRecord(Record):
    """A stored certificate in short."""

    id: str
    project: str
    model: str
    model_digest: Annotated[str, "only certificates of equal weights can be compared"]
    engine: Annotated[str, "engine and release, with its dtype"]
    trainer: str
    made_at: str
    headline: str
    verdicts: Annotated[Mapping[str, str], "identical, rounding, different or not tried, by condition"]
