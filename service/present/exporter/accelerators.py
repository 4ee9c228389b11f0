"""Label values of accelerators: a declared set, since workers and probes name theirs freely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from foreshock_service.present.exporter.repository import ANY_ACCELERATOR

OTHER = "other"
# Slugs of the names that drivers report (`foreshock.environment.device_slug`), and short names in use.
DECLARED = frozenset(
    f"""
    {ANY_ACCELERATOR} {OTHER} cpu gaudi2 gaudi3 tpu
    a10 a100 b200 b300 gb200 gb300 h100 h200 h20 l4 l40s t4 v100 mi210 mi250x mi300x mi325x mi350x mi355x
    nvidia-a10 nvidia-a10g nvidia-a100-sxm4-40gb nvidia-a100-sxm4-80gb nvidia-a100-80gb-pcie nvidia-l4 nvidia-l40
    nvidia-l40s nvidia-h100-80gb-hbm3 nvidia-h100-pcie nvidia-h100-nvl nvidia-h20 nvidia-h200 nvidia-h800 nvidia-b200
    nvidia-b300 nvidia-gb200 nvidia-gb300 nvidia-gh200-480gb nvidia-rtx-a6000 nvidia-rtx-6000-ada-generation
    nvidia-geforce-rtx-3090 nvidia-geforce-rtx-4090 nvidia-geforce-rtx-5090 tesla-t4 tesla-v100-sxm2-32gb
    """.split()
)


class Accelerators:
    """The labels of one scrape: a declared name is its own label, any other is `other` and counted."""

    def __init__(self, further: str) -> None:
        self._declared = DECLARED | {name.strip() for name in further.split(",")}
        self._others: set[str] = set()

    def label(self, accelerator: str) -> str:
        """Return the label of an accelerator."""
        if accelerator in self._declared:
            return accelerator
        self._others.add(accelerator)
        return OTHER

    def added(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return counts by label."""
        labelled: Counter[str] = Counter()
        for accelerator, count in counts.items():
            labelled[self.label(accelerator)] += count
        return labelled

    @property
    def others(self) -> int:
        """Number of names that became `other`."""
        return len(self._others)
