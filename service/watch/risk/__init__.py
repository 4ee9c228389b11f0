"""The risk of a run: an ordinal level from the alerts that stand."""
