"""Scores of one network a family against PaddlePaddle's, with its weights copied over by name."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import polyreme
from polyreme.eager.tensor import to_tensor
from polyreme.jit import to_static
from polyreme.vision import models

PADDLE = os.environ.get("POLYREME_TEST_PADDLE_PYTHON")
SIDE = Path(__file__).with_name("networks_side.py")
# name: (side of the image, scale if it is not the default)
NETWORKS = {
    "alexnet": (224, ""), "vgg11_bn": (64, ""), "densenet121": (64, ""), "googlenet": (224, ""),
    "inception_v3": (128, ""), "mobilenet_v1": (64, "0.5"), "mobilenet_v2": (64, "0.75"),
    "mobilenet_v3_small": (64, ""), "mobilenet_v3_large": (64, "0.75"), "shufflenet_v2_x0_25": (64, ""),
    "shufflenet_v2_swish": (64, ""), "squeezenet1_0": (96, ""), "squeezenet1_1": (96, ""), "resnet18": (64, ""),
    "resnext50_32x4d": (64, ""), "wide_resnet50_2": (64, ""),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.skipif(PADDLE is None, reason="POLYREME_TEST_PADDLE_PYTHON names no interpreter with paddlepaddle")
@pytest.mark.parametrize("name", NETWORKS)
def test_scores_are_those_of_paddle(name, tmp_path):
    size, scale = NETWORKS[name]
    subprocess.run([PADDLE, str(SIDE), name, str(size), str(tmp_path), scale], check=True, timeout=600)
    stored = np.load(tmp_path / f"{name}.npz")
    settings = {"batch_norm": True} if name.endswith("_bn") else {"scale": float(scale)} if scale else {}
    network = getattr(models, name.removesuffix("_bn"))(num_classes=10, **settings)
    weights = {key[2:]: stored[key] for key in stored.files if key.startswith("w:")}
    assert {k: tuple(v.shape) for k, v in network.state_dict().items()} == {k: v.shape for k, v in weights.items()}
    network.set_state_dict(weights)
    network.eval()
    with polyreme.no_grad():
        found = to_static(network)(to_tensor(stored["x"]))
    for at, scores in enumerate(found if isinstance(found, (list, tuple)) else [found]):
        want = stored[f"y{at}"]
        # up to 120 layers of sums in other orders: rounding of one in 2^24 grows with the square root of their number
        bound = 64 * np.sqrt(120) * 2.0**-24 * np.abs(want).max()
        np.testing.assert_allclose(scores.numpy(), want, rtol=0, atol=bound)
