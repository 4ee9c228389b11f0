"""The figures of the pages, one file each.

Pure functions from curves to a `Figure`, or to a `Missing` that gives the reason why there is none.
"""

from foreshock_service.present.pages.figures.drawing import Curve, Figure, Missing

__all__ = ["Curve", "Figure", "Missing"]
