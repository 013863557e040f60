"""What layers are made of, against PaddlePaddle's: names of parameters and state in order, and of the layers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.layers import EVALUATED, ROWS
from tests.oracle.side import encoded

PADDLE = os.environ.get("POLYREME_TEST_PADDLE_PYTHON")
SIDE = Path(__file__).with_name("structure_side.py")
LAYERS = [
    *((name, args, kwargs) for name, args, kwargs, _ in ROWS),
    *((name, (), {}) for name in EVALUATED if name != "BatchNorm2D"),
    ("SyncBatchNorm", (3,), {}),
    ("SpectralNorm", ([3, 4],), {}),
    ("Linear", (2, 3), {"name": "head"}),
    ("BatchNorm", (2,), {"moving_mean_name": "seen"}),
]
# class: (what differs, why)
DIFFERENT = {
    "RMSNorm": ("all", "PaddlePaddle 3.3 has it as a function only"),
    "AdaptiveLogSoftmaxWithLoss": (
        "parameters state",
        "there the weights of the tail are no parameters, and untrained",
    ),
    "CrossEntropyLoss": ("buffers", "weights of classes are settings; there a buffer that no state has"),
    "NLLLoss": ("buffers", "weights of classes are settings; there a buffer that no state has"),
    "SimpleRNN": ("buffers", "there is no state of cuDNN's dropout here"),
    "LSTM": ("buffers", "there is no state of cuDNN's dropout here"),
    "GRU": ("buffers", "there is no state of cuDNN's dropout here"),
}
PARTS = ("full_name", "parameters", "buffers", "state")
# attributes that PaddlePaddle keeps for itself: switches of its kernels and of its static graphs, caches, hooks
INTERNAL = """
    _activation _activation_fn _all_weights _built _cast_to_low_precision _channel_dim _customized_attrs _device _dtype
    _flat_weight _forward_post_hooks_always_called _forward_post_hooks_with_kwargs_flag _fuse_with_relu
    _forward_pre_hooks_with_kwargs_flag _gate_activation _helper _in_place _init_in_dynamic_mode _is_distributed
    _loaddict_holder _op_recorder _op_type _original_funcs _padding_algorithm _remote_prefetch could_use_cudnn
    _reversed_padding_repeated_twice _updated_padding _use_cudnn tail_weights
""".split()  # noqa: SIM905
# public attributes that are not here, and why
ABSENT = {
    "backward": "it always raises",
    "full": "an attribute for scripts alone",
    "sharded_state_dict": "as full",
    "get_extra_state": "it always raises",
    "xpu": "no such device",
    "could_use_cudnn": "a switch of PaddlePaddle's kernels",
    "state_dtype": "cells' states have the dtype of their inputs",
}
# None stands for False in BatchNorm; an LPPool keeps the number it was given
KEPT_AS = {("BatchNorm", "_use_global_stats"), ("LPPool1D", "norm_type"), ("LPPool2D", "norm_type")}


@pytest.mark.oracle
@pytest.mark.skipif(PADDLE is None, reason="POLYREME_TEST_PADDLE_PYTHON names no interpreter with paddlepaddle")
def test_layers_hold_what_paddles_hold_under_the_same_names(tmp_path):
    """Parameters, buffers and state in the same order, and settings: those that PaddlePaddle's instances keep."""
    layers = [row for row in LAYERS if DIFFERENT.get(row[0], ("",))[0] != "all"]
    (tmp_path / "layers").write_text(json.dumps([[n, encoded(list(a)), encoded(k)] for n, a, k in layers]))
    sides = []
    for python, framework in ((sys.executable, "polyreme"), (PADDLE, "paddle")):
        subprocess.run(
            [python, str(SIDE), framework, tmp_path / "layers", tmp_path / framework], check=True, timeout=600
        )
        sides.append(json.loads((tmp_path / framework).read_text()))
    differences = [
        f"{name}{args}: {part}: {ours[part]}, PaddlePaddle {theirs[part]}"
        for (name, args, _), ours, theirs in zip(layers, *sides, strict=True)
        for part in PARTS
        if ours[part] != theirs[part] and part not in DIFFERENT.get(name, ("",))[0].split()
    ]
    differences += [
        f"{name}{args}: {setting}: {ours['settings'].get(setting, 'missing')}, PaddlePaddle {value}"
        for (name, args, _), ours, theirs in zip(layers, *sides, strict=True)
        for setting, value in theirs["settings"].items()
        if setting in theirs["kept"] and setting not in INTERNAL and (name, setting) not in KEPT_AS
        if setting not in ours["settings"] or ours["settings"][setting] != value
    ]
    differences += [
        f"{name}{args}: no {attribute}"
        for (name, args, _), ours, theirs in zip(layers, *sides, strict=True)
        for attribute in theirs["attributes"]
        if not attribute.startswith("_") and attribute not in ours["attributes"] and attribute not in ABSENT
    ]
    assert differences == []
