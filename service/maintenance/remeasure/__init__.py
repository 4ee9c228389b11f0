"""`foreshock remeasure`: measure stored steps again from their token files, with the formulas of this release."""
