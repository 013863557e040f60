"""Time a training step of a GPT with 1.3 billion parameters on one GPU: polyreme, captured, against torch.compile.

    python benchmarks/gpu_gpt.py [--layers 24 --hidden 2048 --heads 16 --seq 2048 --batch 8] [--rounds 3]

Both sides: float32 weights and AdamW state, products in bfloat16 (autocast), tied embedding and head, random weights
and batch of the same sizes, no dropout. Sides take turns (sides.py), each in a process of its own with both on the card
at once. Prints one JSON line: milliseconds a step, tokens/s and MFU of each side and the ratio of times. FLOP a token:
6 a weight of the blocks and the head, and 6 * layers * seq * hidden for causal attention (of which half the scores are
computed); against the card's dense bfloat16 rate.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import sides as s

# dense bfloat16 FLOP/s by data sheet
PEAK = {"h100": 989e12, "h200": 989e12, "a100": 312e12}
SETTINGS = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def parsed() -> argparse.Namespace:
    """The sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 24, "hidden": 2048, "heads": 16, "seq": 2048, "batch": 8, "vocab": 50304}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps a side takes in each round")
    parser.add_argument("--sides", default="polyreme,torch-compile")
    parser.add_argument("--peak", type=float, default=PEAK["h200"], help="FLOP/s that MFU is of")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def flops_per_token(o: argparse.Namespace) -> float:
    """Of forward and backward."""
    weights = 12 * o.layers * o.hidden**2 + o.vocab * o.hidden
    return 6 * weights + 6 * o.layers * o.seq * o.hidden


def build_polyreme(o: argparse.Namespace):
    """-> a function that does one step and returns its loss."""
    import polyreme as paddle
    from polyreme.models.decoders.gpt import GPT, GPTConfig

    sizes = {"vocab_size": o.vocab, "hidden_size": o.hidden, "num_layers": o.layers, "num_heads": o.heads}
    network = GPT(GPTConfig(**sizes, seq_len=o.seq))
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=network.parameters(), weight_decay=0.01)

    @paddle.jit.to_static
    def step(ids, labels):
        with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
            loss = network(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    tokens = paddle.randint(0, o.vocab, [o.batch, o.seq + 1], dtype="int32")
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    return lambda: step(ids, labels)


def build_torch(o: argparse.Namespace, compiled: bool):
    """-> a function that does one step and returns its loss."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(o.hidden) for _ in range(2)])
            self.qkv, self.out = nn.Linear(o.hidden, 3 * o.hidden), nn.Linear(o.hidden, o.hidden)
            self.up, self.down = nn.Linear(o.hidden, 4 * o.hidden), nn.Linear(4 * o.hidden, o.hidden)

        def forward(self, x):
            shape = (*x.shape[:2], o.heads, -1)
            q, k, v = (y.view(shape).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(o.vocab, o.hidden), nn.Embedding(o.seq, o.hidden)
            self.blocks, self.norm = nn.ModuleList([Block() for _ in range(o.layers)]), nn.LayerNorm(o.hidden)

        def forward(self, ids, labels):
            x = self.tokens(ids) + self.places(torch.arange(o.seq, device=ids.device))
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.tokens.weight)
            return F.cross_entropy(logits.view(-1, o.vocab), labels.reshape(-1))

    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model()
        nn.init.normal_(model.tokens.weight, std=0.02)
        tokens = torch.randint(o.vocab, (o.batch, o.seq + 1))
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def main() -> None:
    """Works as a side, or measures all."""
    o = parsed()
    if o.worker:
        build = {"polyreme": build_polyreme, "torch": lambda o: build_torch(o, False)}
        build["torch-compile"] = lambda o: build_torch(o, True)
        s.work(lambda side: {"step": build[side](o)}, o.worker)
        return
    sizes = {n: getattr(o, n) for n in ("layers", "hidden", "heads", "seq", "batch", "vocab")}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    sides = [s.Side(__file__, name, sys.executable, SETTINGS, options) for name in o.sides.split(",")]

    def warm(side: s.Side) -> dict:
        """Compile, and tell of a first round: the other side may still be compiling."""
        start = time.perf_counter()
        first = {"part": "gpt", "side": side.name, "sizes": sizes, "losses": side.ask("step", 3)["values"]}
        first["seconds_to_third_step"] = round(time.perf_counter() - start, 1)
        side.measure("step", 2, o.steps)
        print(json.dumps(first | figures(o, side)), flush=True)
        side.seconds.clear()
        return first

    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(warm, sides))
        for _ in range(o.rounds):
            for side in sides:
                side.measure("step", 1, o.steps)
    finally:
        for side in sides:
            side.close()
    result = {"part": "gpt", "sizes": sizes, **{side.name: figures(o, side) for side in sides}}
    if len(sides) > 1:
        result["speedup"] = round(sides[1].median("step") / sides[0].median("step"), 3)
    print(json.dumps(result), flush=True)


def figures(o: argparse.Namespace, side: s.Side) -> dict:
    """What a side's steps come to."""
    seconds, tokens = side.median("step"), o.batch * o.seq
    return {
        "ms": round(1e3 * seconds, 2),
        "least_ms": round(1e3 * side.least("step"), 2),
        "tokens_per_s": round(tokens / seconds),
        "mfu": round(flops_per_token(o) * tokens / seconds / o.peak, 4),
        "versions": side.versions,
    }


if __name__ == "__main__":
    main()
