"""`foreshock remeasure`: what is stored, measured again from the token files with the formulas of this release."""
