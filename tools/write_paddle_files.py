"""Writes tests/paddle_files with PaddlePaddle 3.3.1: what its save and load have to agree on with ours.

Run in an environment of its own (pip install paddlepaddle==3.3.1 numpy==2.2.6): python tools/write_paddle_files.py.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import paddle

FOLDER = Path(__file__).parent.parent / "tests" / "paddle_files"
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64",
          "complex128")  # fmt: skip


def numbered(layer: paddle.nn.Layer) -> paddle.nn.Layer:
    """The Layer with parameters and statistics of known values: 0, 0.25, 0.5, ..."""
    start = 0
    for tensor in layer.state_dict().values():
        count = int(np.prod(tensor.shape))
        tensor.set_value((np.arange(start, start + count, dtype=np.float32) / 4).reshape(tensor.shape))
        start += count
    return layer


def write_states() -> None:
    """State dicts of a Layer and an optimizer, every dtype, nested values, and a Tensor as a record."""
    net = numbered(paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3)))
    for protocol in (2, 3, 4):
        paddle.save(net.state_dict(), str(FOLDER / f"state_{protocol}.pdparams"), protocol=protocol)
    schedule = paddle.optimizer.lr.StepDecay(0.5, 3)
    optimizer = paddle.optimizer.Adam(schedule, parameters=net.parameters())
    net(paddle.to_tensor([[1.0, 2.0], [3.0, 5.0]])).square().sum().backward()
    optimizer.step()
    schedule.step()
    paddle.save(optimizer.state_dict(), str(FOLDER / "adam.pdopt"))
    tensors = {name: paddle.to_tensor([0.0, 1.0, 2.0]).cast(name) for name in DTYPES}
    paddle.save(tensors, str(FOLDER / "dtypes.pdparams"))
    nested = {
        "model": OrderedDict(numbered(net).state_dict()),
        "pairs": [(tensors["bfloat16"], 3), np.arange(2)],
        "epoch": 7,
        "name": "x",
        "rate": np.float32(0.5),
        "none": None,
    }
    paddle.save(nested, str(FOLDER / "nested.pdparams"))
    paddle.save(tensors["float32"], str(FOLDER / "record.pdtensor"), use_binary_format=True)
    dense = paddle.base.core.DenseTensor()
    dense.set(np.ones((2, 2), np.float32), paddle.CPUPlace())
    paddle.save([dense], str(FOLDER / "dense.pdtensor"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write_states()
