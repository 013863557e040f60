"""Time what a user of eager code waits for: building a model, and its first training steps, in fresh processes.

    python benchmarks/first_step.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

Cases: ResNet-50 and MobileNetV3 (small) on 2 images of 64 x 64 with Momentum, and an encoder of BERT sizes with 2
layers on 2 x 64 tokens with AdamW. Sides: `polyreme cold` has an empty compile cache, `polyreme warm` the one that its
cold run left; `paddle`; `torch` (the encoder only: torchvision is another package). Seconds of wall time and, in
brackets, of processor time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sides as s

SIDES = ("polyreme cold", "polyreme warm", "paddle", "torch")
CLASSIFIERS = {"ResNet-50": "resnet50", "MobileNetV3": "mobilenet_v3_small"}
CASES = (*CLASSIFIERS, "encoder")
PARTS = ("build", "step 1", "step 2", "step 3")
VOCABULARY, WIDTH, HEADS, LAYERS = 30522, 768, 12, 2


def classifier(lib: Any, name: str) -> tuple[Any, Any, Callable[[], Any]]:
    """A model of lib.vision, its optimizer and its loss."""
    model = getattr(lib.vision.models, name)(num_classes=10)
    images = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype("float32")
    images, labels = lib.to_tensor(images), lib.to_tensor(np.array([1, 2]))
    optimizer = lib.optimizer.Momentum(0.01, parameters=model.parameters())
    return model, optimizer, lambda: lib.nn.functional.cross_entropy(model(images), labels)


def encoder(lib: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """The same of an encoder with an embedding and a head."""
    layer = lib.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu")
    body, words = lib.nn.TransformerEncoder(layer, LAYERS), lib.nn.Embedding(VOCABULARY, WIDTH)
    model = lib.nn.LayerList([body, words, lib.nn.LayerNorm(WIDTH), lib.nn.Linear(WIDTH, 2)])
    ids = lib.to_tensor(np.random.default_rng(0).integers(0, VOCABULARY, (2, 64)))
    labels = lib.to_tensor(np.array([0, 1]))
    optimizer = lib.optimizer.AdamW(1e-4, parameters=model.parameters())

    def loss() -> Any:
        hidden = model[2](body(words(ids)))
        return lib.nn.functional.cross_entropy(model[3](hidden[:, 0]), labels)

    return model, optimizer, loss


def encoder_of_torch(torch: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """encoder in PyTorch's spelling."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True)
    body, words = nn.TransformerEncoder(layer, LAYERS), nn.Embedding(VOCABULARY, WIDTH)
    norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
    model = nn.ModuleList([body, words, norm, head])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (2, 64)))
    labels = torch.tensor([0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return model, optimizer, lambda: nn.functional.cross_entropy(head(norm(body(words(ids)))[:, 0]), labels)


def work(case: str, side: str) -> None:
    """One fresh process: prints {part: [wall, processor seconds]}."""
    if side == "torch":
        import torch

        build: Callable = lambda: encoder_of_torch(torch)
    else:
        if side == "paddle":
            import paddle as lib

            lib.set_device("cpu")
        else:
            import polyreme as lib
        lib.seed(0)
        lib.ones([1]) + 1  # the backend's start is no part of it
        build = lambda: classifier(lib, CLASSIFIERS[case]) if case in CLASSIFIERS else encoder(lib)
    times: dict[str, list[float]] = {}

    def timed(part: str, run: Callable) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        times[part] = [time.perf_counter() - wall, time.process_time() - cpu]
        return result

    _, optimizer, loss = timed("build", build)

    def step() -> float:
        value = loss()
        value.backward()
        optimizer.step()
        (optimizer.zero_grad if side == "torch" else optimizer.clear_grad)()
        return float(value)

    for part in PARTS[1:]:
        timed(part, step)
    print(json.dumps(times))


def measure(options: argparse.Namespace) -> dict[tuple[str, str], dict[str, list[list[float]]]]:
    """(case, side) -> part -> its times, one a round."""
    pythons = {"paddle": options.python_paddle, "torch": options.python_torch}
    times_of: dict[tuple[str, str], dict[str, list[list[float]]]] = {}
    for case in CASES:
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                for side in SIDES:
                    python = pythons.get(side, sys.executable)
                    if python is None or (side == "torch" and case in CLASSIFIERS):
                        continue
                    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
                    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
                    env["POLYREME_COMPILE_CACHE"] = cache
                    command = [python, __file__, "--worker", side, "--case", case]
                    run = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
                    for part, times in json.loads(run.stdout.splitlines()[-1]).items():
                        times_of.setdefault((case, side), {}).setdefault(part, []).append(times)
    return times_of


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python-torch", help="interpreter of an environment with torch; else it is left out")
    parser.add_argument("--python-paddle", help="interpreter of an environment with paddlepaddle; likewise")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.case, options.worker)
        return
    rows = [f"| case | side | {' | '.join(PARTS)} |", "|---" * (len(PARTS) + 2) + "|"]
    for (case, side), parts in measure(options).items():
        medians = [[statistics.median(column) for column in zip(*parts[part], strict=True)] for part in PARTS]
        cells = [f"{wall:.2f} ({cpu:.2f})" for wall, cpu in medians]
        rows.append(f"| {case} | {side} | {' | '.join(cells)} |")
    text = "\n".join(rows)
    print(text)
    if options.save:
        what = f"Wall seconds (processor seconds), medians of {options.rounds} rounds of fresh processes."
        print(s.save(options.save, "First steps of eager code", what, text, []))


if __name__ == "__main__":
    main()
