"""For type checkers: where the names of polyreme.distributed stand. Written by tools/write_stubs.py."""

from polyreme.distributed import api as api
from polyreme.distributed import auto_parallel as auto_parallel
from polyreme.distributed import checkpoint as checkpoint
from polyreme.distributed import comm_report as comm_report
from polyreme.distributed import communication as communication
from polyreme.distributed import data_parallel as data_parallel
from polyreme.distributed import fleet as fleet
from polyreme.distributed import fsdp as fsdp
from polyreme.distributed import gradient_merge as gradient_merge
from polyreme.distributed import job as job
from polyreme.distributed import launch as launch
from polyreme.distributed import models as models
from polyreme.distributed import parallel as parallel
from polyreme.distributed import placement as placement
from polyreme.distributed import planned_model as planned_model
from polyreme.distributed import planned_step as planned_step
from polyreme.distributed import protein_folding as protein_folding
from polyreme.distributed import prove as prove
from polyreme.distributed import recompute_calls as recompute_calls
from polyreme.distributed import settings as settings
from polyreme.distributed import sharding as sharding
from polyreme.distributed import spawning as spawning
from polyreme.distributed import splitting as splitting
from polyreme.distributed import tasks as tasks
from polyreme.distributed import tensor_parallel as tensor_parallel
from polyreme.distributed import unshard as unshard
from polyreme.distributed import utils as utils
from polyreme.distributed import whole_step as whole_step
from polyreme.distributed.api import *
