"""What a step communicates: a LLaMA marked with shard_tensor and run by Engine, beside the same model under fleet.

    CPU_NUM=8 JAX_PLATFORMS=cpu python benchmarks/engine_collectives.py [--dp 2] [--mp 4] [--layers 2] [--steps 4]

Prints the losses of both, and for every kind of collective and mesh axes how many there are and the bytes that a device
sends in a step, read off the two compiled programs. Ends with an error if the Engine's are more.
"""

import argparse
import os
from collections import defaultdict

os.environ.setdefault("CPU_NUM", "8")

import numpy as np

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme.distributed import ProcessMesh, Replicate, Shard, fleet, shard_tensor
from polyreme.distributed.comm_report import find_collectives
from polyreme.distributed.fleet import auto
from polyreme.mesh import MeshShape
from polyreme.models.decoders.llama import Llama, LlamaConfig

COLUMNS = ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up", "head")
ROWS = ("attention.out", "ffn.down", "tokens")


def model_and_optimizer(config: LlamaConfig, mesh: ProcessMesh | None = None):
    """A LLaMA, its weights marked on a mesh if one is given, and AdamW with a global clip."""
    paddle.seed(5)
    model = Llama(config)
    for name, layer in model.named_sublayers() if mesh is not None else ():
        dim = 1 if name.endswith(COLUMNS) else 0 if name.endswith(ROWS) else None
        if dim is not None:
            layer.weight = shard_tensor(layer.weight, mesh, [Replicate(), Shard(dim)])
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    return model, paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), grad_clip=clip)


def loss_of(logits, labels):
    """Mean cross-entropy."""
    return F.cross_entropy(logits.reshape([-1, logits.shape[-1]]), labels.reshape([-1]))


def under_fleet(config: LlamaConfig, batches: list, dp: int, mp: int) -> tuple[list[float], str]:
    """Losses and the step's program: fleet.init, distributed_model, and a captured step written by hand."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": dp, "mp_degree": mp}
    fleet.init(is_collective=True, strategy=strategy)
    model, optimizer = model_and_optimizer(config)
    model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)

    @paddle.jit.to_static
    def step(tokens, labels):
        loss = loss_of(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    pairs = [(paddle.to_tensor(x), paddle.to_tensor(y)) for x, y in batches]
    losses = [float(step(x, y)) for x, y in pairs]
    text = step.compiled(*pairs[0]).as_text()
    fleet.reset()
    return losses, text


def under_engine(config: LlamaConfig, batches: list, dp: int, mp: int) -> tuple[list[float], str]:
    """Losses and the step's program: the model marked on a mesh, and Engine."""
    mesh = ProcessMesh(np.arange(dp * mp).reshape(dp, mp), ["dp", "mp"])
    model, optimizer = model_and_optimizer(config, mesh)
    engine = auto.Engine(model, loss_of, optimizer)
    losses = [float(engine.run(list(batch))["loss"]) for batch in batches]
    return losses, engine.main_program.as_text()


def totals(text: str, mesh: MeshShape) -> dict[tuple, tuple[int, float]]:
    """(kind, axes) -> (collectives a step, bytes that a device sends)."""
    found: dict[tuple, list] = defaultdict(lambda: [0, 0.0])
    for c in find_collectives(text, mesh):
        found[c.kind, c.axes][0] += c.times
        found[c.kind, c.axes][1] += c.total_wire
    return {key: tuple(value) for key, value in found.items()}


def main() -> None:
    """Run both and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("dp", 2), ("mp", 4), ("layers", 2), ("steps", 4), ("batch", 4), ("seq", 16), ("hidden", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    config = LlamaConfig.nano(
        num_layers=args.layers, hidden_size=args.hidden, seq_len=args.seq, num_heads=max(4, args.mp),
        num_kv_heads=max(4, args.mp),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (args.steps, args.batch, args.seq + 1))
    batches = [(t[:, :-1], t[:, 1:]) for t in tokens]
    sides = {"fleet": under_fleet, "engine": under_engine}
    found = {name: run(config, batches, args.dp, args.mp) for name, run in sides.items()}
    mesh = MeshShape(dp=args.dp, mp=args.mp)
    tables = {name: totals(text, mesh) for name, (_, text) in found.items()}
    print("losses    ", *(f"step {at}   " for at in range(args.steps)))
    for name, (losses, _) in found.items():
        print(f"{name:10}", *(f"{loss:.7f}" for loss in losses))
    print(f"\n{'collective':20} {'axes':8} {'fleet':>18} {'engine':>18}")
    more = []
    for key in sorted({*tables["fleet"], *tables["engine"]}, key=str):
        cells = [tables[name].get(key, (0, 0.0)) for name in sides]
        print(f"{key[0]:20} {'+'.join(key[1] or ('?',)):8}", *(f"{n:>4} of {size:>8.0f} B" for n, size in cells))
        more += [key] if cells[1][1] > cells[0][1] else []
    if more:
        raise SystemExit(f"the Engine's program sends more: {more}")


if __name__ == "__main__":
    main()
