"""Time one request of batch 1, ndarray in and ndarray out, to a served model, in several frameworks.

    python benchmarks/inference.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

Models: an MLP 784-128-64-10, and an encoder of BERT-tiny's size (2 layers, hidden 128, 2 heads, ffn 512, vocabulary
30,522, 64 tokens; 2 classes from the first token). Sides: `polyreme` and `paddle` save the same code with jit.save and
run it in their predictors through handles; `jit` calls the saved program by jax.jit alone, the least that a predictor
on JAX can cost; `jit-inline` does so with programs run in the calling thread, as a predictor's process does; `torch` is
eager, in inference mode, on all cores, and `torch-one-thread` on one; `paddle-threads` and `paddle-onednn` are Paddle's
predictor with its math library on all cores, and with oneDNN too. Models are saved by one process and served by
another. All sides have the same weights and must give the same outputs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import sides as s

SIDES = ("jit", "jit-inline", "polyreme", "torch", "torch-one-thread", "paddle", "paddle-threads", "paddle-onednn")
CASES = ("mlp", "encoder")
VOCAB, HIDDEN, HEADS, FFN, TOKENS, LAYERS = 30_522, 128, 2, 512, 64, 2
# two layers of sums of up to 784 products, of size about 1
TOLERANCE = 2.0**-23 * 784**0.5 * 16


def value_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The weight of a name, in Paddle's layout [in, out]."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    noise = rng.standard_normal(shape).astype(np.float32) * 0.05
    return noise + 1 if "norm" in name and name.endswith("weight") else noise


def inputs() -> dict[str, np.ndarray]:
    """The request of each case."""
    rng = np.random.default_rng(0)
    return {
        "mlp": rng.standard_normal((1, 784)).astype(np.float32),
        "encoder": rng.integers(0, VOCAB, (1, TOKENS)),
    }


def paddle_models(paddle: Any) -> dict[str, Any]:
    """The models in Paddle's API, which two frameworks have."""
    nn = paddle.nn

    class Encoder(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, HIDDEN)
            self.positions = nn.Embedding(TOKENS, HIDDEN)
            self.norm = nn.LayerNorm(HIDDEN)
            layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, dropout=0.0, activation="gelu")
            self.encoder = nn.TransformerEncoder(layer, LAYERS)
            self.head = nn.Linear(HIDDEN, 2)

        def forward(self, ids: Any) -> Any:
            x = self.norm(self.tokens(ids) + self.positions.weight)
            return self.head(self.encoder(x)[:, 0])

    mlp = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    models = {"mlp": mlp, "encoder": Encoder()}
    for model in models.values():
        model.eval()
        for name, tensor in model.state_dict().items():
            tensor.set_value(value_of(name, tuple(tensor.shape)))
    return models


def torch_models() -> dict[str, Any]:
    """The same in PyTorch, with the same weights."""
    import torch

    nn = torch.nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, HIDDEN)
            self.positions = nn.Embedding(TOKENS, HIDDEN)
            self.norm = nn.LayerNorm(HIDDEN)
            layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, FFN, 0.0, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, LAYERS)
            self.head = nn.Linear(HIDDEN, 2)

        def forward(self, ids: Any) -> Any:
            x = self.norm(self.tokens(ids) + self.positions.weight)
            return self.head(self.encoder(x)[:, 0])

    mlp = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    models = {"mlp": mlp, "encoder": Encoder()}
    for model in models.values():
        model.eval()
        linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        for name, tensor in model.state_dict().items():
            tensor.copy_(torch.from_numpy(_torch_value(name, tuple(tensor.shape), name in linear)))
    return models


def _torch_value(name: str, shape: tuple[int, ...], is_linear: bool) -> np.ndarray:
    if "in_proj" in name:  # query, key and value in one
        kind = name.rsplit("_", 1)[1]
        one = (HIDDEN, HIDDEN) if kind == "weight" else (HIDDEN,)
        parts = [value_of(name.replace(f"in_proj_{kind}", f"{p}_proj.{kind}"), one) for p in "qkv"]
        return np.concatenate([p.T for p in parts])
    return value_of(name, shape[::-1]).T.copy() if is_linear else value_of(name, shape)


def write(folder: str, framework: str) -> None:
    """Saves the models of a framework in Paddle's API as FOLDER/CASE."""
    paddle = import_module(framework)
    spec = paddle.static.InputSpec
    specs = {"mlp": spec([None, 784], "float32", "x"), "encoder": spec([None, TOKENS], "int64", "ids")}
    for case, model in paddle_models(paddle).items():
        paddle.jit.save(model, f"{folder}/{case}", [specs[case]])


def by_handles(predictor: Any, x: np.ndarray) -> Callable[[], Any]:
    """A request through a predictor's handles, which both frameworks have."""
    given = predictor.get_input_handle(predictor.get_input_names()[0])
    output = predictor.get_output_handle(predictor.get_output_names()[0])

    def request() -> Any:
        given.copy_from_cpu(x)
        predictor.run()
        return output.copy_to_cpu()[0, 0]

    return request


def build(side: str) -> dict[str, Callable[[], Any]]:
    """-> a request of each case; the framework is imported here, in the side's own process."""
    arrays = inputs()
    if side.startswith("torch"):
        import torch

        if side == "torch-one-thread":
            torch.set_num_threads(1)
        models = torch_models()

        def request(case: str) -> Any:
            with torch.inference_mode():
                return models[case](torch.from_numpy(arrays[case])).numpy()[0, 0]

        return {case: lambda case=case: request(case) for case in CASES}
    if side.startswith("paddle"):
        import paddle

        paddle.set_device("cpu")
    else:
        import polyreme as paddle
    folder = tempfile.mkdtemp()
    subprocess.run([sys.executable, __file__, "--write", folder, paddle.__name__], check=True, stdout=sys.stderr)
    prefixes = {case: f"{folder}/{case}" for case in CASES}
    if side.startswith("jit"):
        if side == "jit-inline":
            from polyreme.core.engine import backend

            backend.run_in_calling_thread()
        return {case: _bare(prefixes[case], arrays[case]) for case in CASES}
    return {case: by_handles(_predictor(paddle, side, prefixes[case]), arrays[case]) for case in CASES}


def _predictor(paddle: Any, side: str, prefix: str) -> Any:
    inference = import_module(f"{paddle.__name__}.inference")
    config = inference.Config(f"{prefix}.json", f"{prefix}.pdiparams")
    if side in ("paddle-threads", "paddle-onednn"):
        config.set_cpu_math_library_num_threads(os.cpu_count())
    if side == "paddle-onednn":
        config.enable_mkldnn()
    return inference.create_predictor(config)


def _bare(prefix: str, x: np.ndarray) -> Callable[[], Any]:
    import jax

    from polyreme import export

    artifact = export.read(prefix)
    call, state = jax.jit(artifact.function("forward").programs[0].call), artifact.state
    return lambda: np.asarray(call(state, [x])[0])[0, 0]


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=15)
    parser.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=200, help="requests to a side in each round")
    options = s.options_of(parser, SIDES)
    if options.write:
        write(*options.write)
        return
    if options.worker:
        s.work(build, options.worker)
        return
    text, sides = s.table_of_cases(__file__, options, CASES, calls=options.requests, tolerance=TOLERANCE)
    print(text)
    if options.save:
        what = f"Batch 1, float32, ndarray in and out. {options.rounds} rounds of {options.requests} requests."
        print(s.save(options.save, "Latency of a request", what, text, sides))


if __name__ == "__main__":
    main()
