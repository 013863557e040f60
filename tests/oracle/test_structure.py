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


@pytest.mark.oracle
@pytest.mark.skipif(PADDLE is None, reason="POLYREME_TEST_PADDLE_PYTHON names no interpreter with paddlepaddle")
def test_layers_hold_what_paddles_hold_under_the_same_names(tmp_path):
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
    assert differences == []
