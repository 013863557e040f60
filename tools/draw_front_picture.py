"""Draws docs/front.svg, the picture on README's front page: one loop on one device and over sixteen, and its pipeline.

`python tools/draw_front_picture.py` trains a small network both ways, from the same weights, and draws what it saw.
"""

import os
from pathlib import Path

os.environ["CPU_NUM"] = "16"

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np

import polyreme as paddle
from polyreme.distributed import fleet
from polyreme.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from polyreme.mesh import make_schedule

PICTURE = Path(__file__).parent.parent / "docs" / "front.svg"
STEPS = 40
STAGES = ("#0b5c8a", "#c2662d")
COLOURS = {"F": "#6cb8e6", "B": "#f2a65a", "W": "#8fbf7f"}
WORDS = {"F": "forward", "B": "gradient of inputs", "W": "gradient of weights"}


class Block(paddle.nn.Layer):
    """x + a network of x, whose inner width tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = fleet.meta_parallel.ColumnParallelLinear(16, 64, gather_output=False, has_bias=True)
        self.down = fleet.meta_parallel.RowParallelLinear(64, 16, input_is_parallel=True, has_bias=True)

    def forward(self, x):
        return x + self.down(paddle.nn.functional.gelu(self.up(x)))


def described() -> list[LayerDesc]:
    """The network, a layer after the other."""
    return [*(LayerDesc(Block) for _ in range(4)), LayerDesc(paddle.nn.Linear, 16, 1)]


def losses_alone(batches: list) -> tuple[list[float], list[np.ndarray]]:
    """The loss of each step on one device, and the weights before the first."""
    net = paddle.nn.Sequential(*(layer.build_layer() for layer in described()))
    weights = [p.numpy() for p in net.parameters()]
    optimizer = paddle.optimizer.AdamW(4e-3, parameters=net.parameters())
    losses = []
    for x, y in batches:
        loss = paddle.nn.functional.mse_loss(net(paddle.to_tensor(x)), paddle.to_tensor(y))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses, weights


def losses_together(weights: list[np.ndarray], batches: list) -> list[float]:
    """The loss of each step over sixteen devices, from these weights."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2, "pp_degree": 2, "sharding_degree": 2, "mp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    staged = PipelineLayer(described(), num_stages=2, loss_fn=paddle.nn.MSELoss())
    for parameter, value in zip(staged.parameters(), weights, strict=True):
        parameter.set_value(value)
    model = fleet.distributed_model(staged)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.AdamW(4e-3, parameters=staged.parameters()))
    return [float(model.train_batch(list(batch), optimizer)) for batch in batches]


def main() -> None:
    """Train twice, draw three panels."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        x = rng.standard_normal((32, 16)).astype("float32")
        batches.append((x, np.sin(x[:, :4].sum(1, keepdims=True))))
    alone, weights = losses_alone(batches)
    together = losses_together(weights, batches)
    print(f"largest difference of a loss: {np.abs(np.subtract(together, alone)).max():.1e}")
    mpl.rcParams |= {"font.size": 8, "svg.hashsalt": "polyreme", "svg.fonttype": "none"}
    figure, (mesh, curve, time) = plt.subplots(1, 3, figsize=(10, 2.5), width_ratios=(1.4, 1.5, 2.2))
    for device in range(16):
        row, column = divmod(device, 4)
        patch = plt.Rectangle((column, 3 - row), 0.9, 0.9, color=STAGES[row // 2], alpha=0.55 + 0.4 * (column % 2))
        mesh.add_patch(patch)
    mesh.set(
        xlim=(-0.1, 4),
        ylim=(-0.1, 4),
        title="one loop over 16 devices,\ntwo in each of four dimensions",
    )
    mesh.axis("off")
    curve.semilogy(alone, color="#999999", linewidth=4, label="one device")
    curve.semilogy(together, color="#0b5c8a", linewidth=1, label="sixteen")
    curve.set(title="the same numbers", xlabel="step", ylabel="loss")
    curve.legend(frameon=False)
    schedule = make_schedule("ZBH1", 4, 8)
    for span in schedule.order():
        colour, width = COLOURS[span.task.kind], span.end - span.start
        time.barh(3 - span.stage, width, left=span.start, color=colour, edgecolor="white", linewidth=0.4)
    for kind, colour in COLOURS.items():
        time.barh(0, 0, color=colour, label=WORDS[kind])
    time.set_title(f"planned before hardware is rented: ZBH1, {schedule.bubble_fraction():.0%} idle")
    time.set_yticks(range(4), [f"stage {3 - stage}" for stage in range(4)])
    time.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    for axes in (curve, time):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
