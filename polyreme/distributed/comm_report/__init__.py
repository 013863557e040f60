"""polyreme.distributed.comm_report: what a compiled step communicates, beside what the formulas say it must."""

from polyreme.distributed.comm_report.collectives import Collective, find_collectives
from polyreme.distributed.comm_report.report import Report, Total, examine
from polyreme.distributed.comm_report.volume import COMPILERS, ParameterShape, Term, Workload, terms, workload_of

__all__ = [
    "COMPILERS",
    "Collective",
    "ParameterShape",
    "Report",
    "Term",
    "Total",
    "Workload",
    "examine",
    "find_collectives",
    "terms",
    "workload_of",
]
