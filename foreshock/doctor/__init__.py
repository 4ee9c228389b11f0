"""The doctor: find the variant of a forward pass, weights, sampling or data that reproduces what was logged."""

from foreshock.api.doctor import DoctorReport, Finding
from foreshock.doctor.changes import CannotTryError, Change, Subject
from foreshock.doctor.doctor import examine
from foreshock.doctor.findings import lines_of_differences, report_lines
from foreshock.doctor.trials import Budget

__all__ = [
    "Budget",
    "CannotTryError",
    "Change",
    "DoctorReport",
    "Finding",
    "Subject",
    "examine",
    "lines_of_differences",
    "report_lines",
]
