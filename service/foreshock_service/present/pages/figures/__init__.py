"""The figures of the pages, one file each.

Pure functions that turn curves into a `Figure`, or into a `Missing` with the reason why there is none.
"""

from foreshock_service.present.pages.figures.drawing import Curve, Figure, Missing

__all__ = ["Curve", "Figure", "Missing"]
