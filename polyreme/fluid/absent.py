"""Names of 1.7 that are not here, and what to use in their place."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from typing import Any

from polyreme.stand_ins import absent

_PARAMETER_SERVER = "there are no parameter servers here; use polyreme.distributed.fleet"
_COMPRESSION = "use polyreme.quantization and polyreme.incubate.asp"
_DECODER = "use DynamicRNN to train, and beam_search in a While, or BeamSearchDecoder of fluid.layers, to decode"
_RECTANGLE = "pad sequences to a rectangle with sequence_pad, and use matmul, conv2d and topk"
INSTEAD: dict[str, str] = {
    "data_norm": "use batch_norm; its statistics were kept by parameter servers",
    "reorder_lod_tensor_by_rank": "leave it out: DynamicRNN takes sequences in the order in which they are fed",
    "filter_by_instag": "choose the rows in the reader",
    "load": "use fluid.io.load_vars",
    "parameter_server": _PARAMETER_SERVER,
    "ErrorClipByValue": "use GradientClipByValue",
    "tracer": "there is none: dygraph ops are recorded by the tape", "Tracer": "dygraph ops are recorded by the tape",
    "load_op_library": "declare an op in Python, see docs/adding_an_op.md",
    "slim": _COMPRESSION, "quantize": _COMPRESSION,
    "model_stat": "print the Program, or use paddle.summary and paddle.flops", "decoder": _DECODER,
    "InitState": _DECODER, "StateCell": _DECODER, "TrainingDecoder": _DECODER, "BeamSearchDecoder": _DECODER,
    "hdfs_utils": "read files from a mounted folder", "rank_attention": _PARAMETER_SERVER,
    "tdm_child": _PARAMETER_SERVER, "tdm_sampler": _PARAMETER_SERVER, "search_pyramid_hash": _PARAMETER_SERVER,
    "var_conv_2d": _RECTANGLE, "match_matrix_tensor": _RECTANGLE, "sequence_topk_avg_pooling": _RECTANGLE,
    "tree_conv": _RECTANGLE, "TreeConv": "write it with gather and matmul over the nodes of each tree",
    "switch": "use unique_name.guard",
    "DpsgdOptimizer": "use SGD", "Dpsgd": "use SGD",
    "DGCMomentumOptimizer": "use Momentum", "PipelineOptimizer": "use polyreme.distributed.fleet",
}  # fmt: skip


def refusing(shown: str, module: str) -> Callable[[str], Any]:
    """A module's __getattr__: for a name of 1.7 that is not there a stand-in, which raises AbsentError where it is used
    and says what to use in its place; for any other AttributeError.
    """

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = getattr(sys.modules[module], "__all__", ())
        close = difflib.get_close_matches(name, names, n=1)
        if name in INSTEAD:
            return absent(f"{shown}.{name}", INSTEAD[name])
        rest = f"did you mean {close[0]!r}?" if close else "docs/fluid.md lists what there is"
        raise AttributeError(f"polyreme.{shown} has no {name!r}; {rest}")

    return refuse
