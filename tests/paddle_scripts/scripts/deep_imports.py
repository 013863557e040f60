"""Imports as they stand in real projects: deep module paths, aliases, star imports, and names checked by hasattr."""

import argparse
import sys

import paddle
import paddle.distributed as dist
import paddle.distributed.fleet as fleet
import paddle.nn as nn
import paddle.nn.functional as F
import paddle.nn.initializer as I
import paddle.optimizer as optim
import paddle.vision.transforms as T
from paddle import ParamAttr, Tensor
from paddle.amp import GradScaler, auto_cast
from paddle.distributed.fleet.layers.mpu.mp_layers import ColumnParallelLinear
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import SharedLayerDesc
from paddle.distributed.fleet.utils import recompute
from paddle.io import DataLoader, DistributedBatchSampler
from paddle.metric import Metric
from paddle.nn.initializer import Constant, Normal, XavierUniform
from paddle.nn.layer.common import Linear
from paddle.nn.layer.conv import Conv2D
from paddle.nn.layer.transformer import TransformerEncoderLayer
from paddle.optimizer.lr import LRScheduler
from paddle.regularizer import L2Decay
from paddle.tensor.creation import full
from paddle.vision.models import resnet18

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=2)
arguments = parser.parse_args()
assert nn.Linear is Linear is paddle.nn.Linear
assert nn.Conv2D is Conv2D
assert isinstance(full([arguments.width], 1.5), Tensor)
assert sys.modules["paddle.nn.functional"] is F is paddle.nn.functional
assert issubclass(optim.Adam, paddle.optimizer.Optimizer)
assert issubclass(TransformerEncoderLayer, nn.Layer)
assert hasattr(paddle, "to_tensor")
assert not hasattr(paddle, "no_such_name")
assert all(map(callable, (auto_cast, recompute, resnet18, I.Assign, T.Compose, dist.all_reduce, fleet.init)))
for name in (ColumnParallelLinear, LayerDesc, PipelineLayer, SharedLayerDesc, DataLoader, DistributedBatchSampler,
             Metric, Constant, Normal, XavierUniform, LRScheduler, L2Decay, ParamAttr, GradScaler):  # fmt: skip
    assert isinstance(name, type), name
print("width", arguments.width, full([arguments.width], 1.5).sum().item())
