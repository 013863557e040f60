"""Time one training step of LeNet, batch 64 of 28 x 28 images, with Adam, in several frameworks.

    python benchmarks/lenet.py --python-torch ~/torch/bin/python --python-paddle ~/paddle/bin/python --save NAME

Each step ends with its loss on the host. All sides start at the same weights and must give the same first loss.
"""

from collections.abc import Callable

import mlp_workload as w
import sides as s

SIDES = ("polyreme", "polyreme-eager", "torch", "torch-compile", "paddle")


def torch_lenet():
    """The layers of vision.models.LeNet in PyTorch."""
    import torch

    nn = torch.nn
    return w.filled_torch(
        nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10),
        )
    )  # fmt: skip


def build(side: str) -> dict[str, Callable[[], float]]:
    """-> the step; the framework is imported here, in the side's own process."""
    data = w.batch((1, 28, 28))
    if side == "torch":
        return {"step": w.torch_step(torch_lenet(), "Adam", data)}
    if side == "torch-compile":
        import torch

        return {"step": w.torch_step(torch.compile(torch_lenet()), "Adam", data)}
    if side == "paddle":
        import paddle

        paddle.set_device("cpu")
    else:
        import polyreme as paddle
    network = w.filled_paddle(paddle.vision.models.LeNet())
    return {"step": w.paddle_step(paddle, network, "Adam", data, captured=side == "polyreme")}


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=15)
    parser.add_argument("--steps", type=int, default=20, help="steps a side takes in each round")
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    text, sides = s.table_of_cases(__file__, options, ("step",), calls=options.steps, tolerance=w.TOLERANCE)
    print(text)
    if options.save:
        what = f"LeNet, cross-entropy, Adam, batch 64, float32. {options.rounds} rounds of {options.steps} steps."
        print(s.save(options.save, "LeNet training step", what, text, sides))


if __name__ == "__main__":
    main()
