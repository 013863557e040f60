"""Names of 1.7 that are not here, and what to use in their place."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from typing import Any

_LABELS = "choose and label boxes in the reader, or with layers.py_func; rpn_target_assign does it for anchors"
_PARAMETER_SERVER = "there are no parameter servers here; use polyreme.distributed.fleet"
INSTEAD: dict[str, str] = {
    "reorder_lod_tensor_by_rank": "leave it out: DynamicRNN takes sequences in the order in which they are fed",
    "data_norm": "use batch_norm; its statistics were kept by parameter servers",
    "monkey_patch_variable": "leave it out: Variables have operators",
    "generate_proposal_labels": _LABELS, "generate_mask_labels": _LABELS, "retinanet_target_assign": _LABELS,
    "retinanet_detection_output": "decode each level with box_coder, join them, and use multiclass_nms",
    "DetectionMAP": "fetch the rows of multiclass_nms, and count matches in NumPy",
    "filter_by_instag": "choose the rows in the reader",
    "load": "use fluid.io.load_vars",
    "transpiler": _PARAMETER_SERVER, "DistributeTranspiler": _PARAMETER_SERVER,
    "parameter_server": _PARAMETER_SERVER,
    "contrib": "use polyreme.amp for mixed precision", "evaluator": "use fluid.metrics",
    "ErrorClipByValue": "use GradientClipByValue",
    "load_op_library": "declare an op in Python, see docs/adding_an_op.md",
    "learning_rate_decay": "use the decays of fluid.layers",
    "cuda_pinned_places": "transfers manage their own pinned memory; use cpu_places",
    "switch": "use unique_name.guard",
    "DpsgdOptimizer": "use SGD", "Dpsgd": "use SGD",
    "DGCMomentumOptimizer": "use Momentum", "PipelineOptimizer": "use polyreme.distributed.fleet",
}  # fmt: skip


def refusing(shown: str, module: str) -> Callable[[str], Any]:
    """A module's __getattr__: AttributeError that says what to use in place of a name that is not there."""

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = getattr(sys.modules[module], "__all__", ())
        close = difflib.get_close_matches(name, names, n=1)
        rest = INSTEAD.get(name) or (f"did you mean {close[0]!r}?" if close else "docs/fluid.md lists what there is")
        raise AttributeError(f"polyreme.{shown} has no {name!r}; {rest}")

    return refuse
