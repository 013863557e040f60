"""polyreme.distributed.comm_report: what a compiled step communicates, beside what the formulas say it must."""

from polyreme.distributed.comm_report.collectives import CollectiveInstruction, find_collectives
from polyreme.distributed.comm_report.report import Report, Total, examine
from polyreme.distributed.comm_report.stages import PipelineReport, sends_of
from polyreme.distributed.comm_report.volume import COMPILERS, Term, terms
from polyreme.distributed.comm_report.workload import ParameterShape, Workload, stage_workloads, workload_of

__all__ = [
    "COMPILERS",
    "CollectiveInstruction",
    "ParameterShape",
    "PipelineReport",
    "Report",
    "Term",
    "Total",
    "Workload",
    "examine",
    "find_collectives",
    "sends_of",
    "stage_workloads",
    "terms",
    "workload_of",
]
