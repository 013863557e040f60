"""Time one training step of a two-layer LSTM, 256 wide, on 32 sequences of 128 steps, with SGD, in several frameworks.

    python benchmarks/rnn.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

The last output goes through a linear layer to a cross-entropy over 10 classes; each step ends with its loss and a
parameter on the host. All sides start at the same weights and must give the same first loss. Case "forward" is the
loss alone.
"""

from collections.abc import Callable

import numpy as np
import sides as s

SIDES = ("polyreme", "polyreme-eager", "torch", "paddle")
CASES = ("step", "forward")
BATCH, STEPS, WIDTH, LAYERS, CLASSES = 32, 128, 256, 2, 10
RATE = 0.1
# the loss is a mean of 32 numbers of about 2.3; behind each are 128 steps in two layers of sums of 512 float32
# products, whose rounding errors a cell's gates damp rather than grow
TOLERANCE = 2.0**-23 * (LAYERS * STEPS * 2 * WIDTH) ** 0.5 * 2.3


def batch():
    """Sequences [32, 128, 256] float32 and labels [32] int64."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((BATCH, STEPS, WIDTH), "float32"), rng.integers(0, CLASSES, BATCH)


def weights(shapes):
    """Uniform in +-1/16 (one over the root of the width), float32. Gates lie alike in all three frameworks."""
    rng = np.random.default_rng(1)
    return [(rng.uniform(-1, 1, shape) / WIDTH**0.5).astype(np.float32) for shape in shapes]


def paddle_sides(paddle, captured: bool) -> dict[str, Callable[[], float]]:
    """The step and the forward in polyreme or PaddlePaddle."""
    nn = paddle.nn
    lstm, head = nn.LSTM(WIDTH, WIDTH, LAYERS), nn.Linear(WIDTH, CLASSES)
    parameters = [*lstm.parameters(), *head.parameters()]
    for p, array in zip(parameters, weights([tuple(p.shape) for p in parameters]), strict=True):
        p.set_value(array)
    optimizer = paddle.optimizer.SGD(RATE, parameters=parameters)
    x, y = (paddle.to_tensor(a) for a in batch())

    def loss(x, y):
        return nn.functional.cross_entropy(head(lstm(x)[0][:, -1]), y)

    def step(x, y):
        value = loss(x, y)
        value.backward()
        optimizer.step()
        optimizer.clear_grad()
        return value

    def forward(x, y):
        with paddle.no_grad():
            return loss(x, y)

    if captured:
        step, forward = paddle.jit.to_static(step), paddle.jit.to_static(forward)

    def whole_step() -> float:
        value = float(step(x, y))
        parameters[0].numpy()  # eager steps are asynchronous: the loss is there before the gradients are
        return value

    return {"step": whole_step, "forward": lambda: float(forward(x, y))}


def torch_sides() -> dict[str, Callable[[], float]]:
    """The step and the forward in PyTorch, whose linear layer keeps its weight transposed."""
    import torch

    lstm, head = torch.nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True), torch.nn.Linear(WIDTH, CLASSES)
    parameters = [*lstm.parameters(), *head.parameters()]
    shapes = [tuple(p.shape) for p in lstm.parameters()] + [(WIDTH, CLASSES), (CLASSES,)]
    with torch.no_grad():
        for p, array in zip(parameters, weights(shapes), strict=True):
            p.copy_(torch.from_numpy(array.T.copy() if array.shape == (WIDTH, CLASSES) else array))
    optimizer = torch.optim.SGD(parameters, lr=RATE, fused=True)
    x, y = (torch.from_numpy(a) for a in batch())

    def loss():
        return torch.nn.functional.cross_entropy(head(lstm(x)[0][:, -1]), y)

    def step():
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    def forward():
        with torch.no_grad():
            return loss().item()

    return {"step": step, "forward": forward}


def build(side: str) -> dict[str, Callable[[], float]]:
    """-> the cases; the framework is imported here, in the side's own process."""
    if side == "torch":
        return torch_sides()
    if side == "paddle":
        import paddle

        paddle.set_device("cpu")
        return paddle_sides(paddle, captured=False)
    import polyreme as paddle

    return paddle_sides(paddle, captured=side == "polyreme")


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=15)
    parser.add_argument("--steps", type=int, default=3, help="calls of each case a side makes in each round")
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    text, sides = s.table_of_cases(__file__, options, CASES, calls=options.steps, tolerance=TOLERANCE)
    memory = ", ".join(f"{side.name} {side.peak / 2**20:.0f}" for side in sides)
    text += f"\n\nPeak memory of each side's process, MiB, imports and compilation included: {memory}."
    print(text)
    if options.save:
        what = (
            f"LSTM, {LAYERS} layers of {WIDTH}, {BATCH} sequences of {STEPS} steps, SGD, float32. "
            f"{options.rounds} rounds of {options.steps} calls."
        )
        print(s.save(options.save, "LSTM training step", what, text, sides))


if __name__ == "__main__":
    main()
