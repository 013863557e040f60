"""Starting the processes of a job, restarting them after failures, and saying which rank failed first."""

from polyreme.distributed.launch.main import launch, main
from polyreme.distributed.launch.options import Options, parse

__all__ = ["Options", "launch", "main", "parse"]
