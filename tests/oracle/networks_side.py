"""PaddlePaddle's side of test_networks.py, run by its own interpreter: NAME SIZE FOLDER [SCALE] -> FOLDER/NAME.npz.

The file holds an image batch x, scores y0, y1, ... of it in eval mode, and each weight as w:NAME; normalizations get
statistics that are not those of a fresh network.
"""

import sys

import numpy as np
import paddle
from paddle.vision import models


def main(name: str, size: str, folder: str, scale: str = "") -> None:
    """Write the file."""
    paddle.seed(0)
    rng = np.random.default_rng(0)
    settings = {"batch_norm": True} if name.endswith("_bn") else {"scale": float(scale)} if scale else {}
    network = getattr(models, name.removesuffix("_bn"))(num_classes=10, **settings)
    weights = {}
    for key, value in network.state_dict().items():
        array = value.numpy()
        if key.endswith("_variance"):
            array = rng.uniform(0.5, 1.5, array.shape)
        elif array.ndim == 1:
            array = array + rng.uniform(-0.2, 0.2, array.shape)
        weights[key] = array.astype("float32")
    network.set_state_dict(weights)
    network.eval()
    x = rng.normal(size=(1, 3, int(size), int(size))).astype("float32")
    found = network(paddle.to_tensor(x))
    scores = found if isinstance(found, (list, tuple)) else [found]
    arrays = {f"y{at}": v.numpy() for at, v in enumerate(scores)}
    np.savez(f"{folder}/{name}.npz", x=x, **arrays, **{f"w:{k}": v for k, v in weights.items()})


main(*sys.argv[1:])
