"""What adapters by name cost a server: SmolLM2's tokens a second for 8 requests, with and without adapters beside it.

    python benchmarks/adapters.py [--adapters 4] [--rank 8] [--new 16]

One process; plain weights, requests for the base beside adapters, and requests for all of them in turns, alternating;
of processor seconds the median. polyreme models fetch smollm2-135m comes first.
"""

import argparse
import statistics
import time

import numpy as np

from polyreme.generation import LLM, SamplingParams, TextEngine
from polyreme.models.files.adapters import Adapter, LowRank, linear_modules, place_adapters
from polyreme.nn import LoRA

ROWS = 8
REPEATS = 3


def adapter(model, number: int, rank: int) -> Adapter:
    """A made-up adapter of all linear maps."""
    rng = np.random.default_rng(number)
    lora, layers = LoRA(rank=rank), dict(model.named_sublayers())
    products = {}
    for name, module in linear_modules(model).items():
        a = rng.standard_normal((layers[name].in_features, rank)).astype(np.float32)
        b = rng.standard_normal((rank, layers[name].out_features)).astype(np.float32)
        products[module.theirs] = LowRank(a, module.store(0.001 * b, model.config), lora.scale)
    return Adapter(f"made up {number}", lora, products, "", None)


def write(engine: TextEngine, names: list[str | None], new: int) -> float:
    """Tokens a second of processor time of requests that name these adapters."""
    for number, name in enumerate(names):
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        engine.add(str(number), [number + 5] * 8, params, adapter=name)
    began = time.process_time()
    while engine.has_unfinished:
        engine.step()
    return len(names) * new / (time.process_time() - began)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--new", type=int, default=16)
    options = parser.parse_args()
    sizes = {"max_num_seqs": ROWS, "max_model_len": 128, "enable_prefix_caching": False}
    plain, model = (LLM("smollm2-135m").model for _ in range(2))
    names = [f"adapter {number}" for number in range(options.adapters)]
    rows = place_adapters(model, {name: adapter(model, n, options.rank) for n, name in enumerate(names)})
    beside = TextEngine(model, adapters=rows, **sizes)
    kinds = {
        "plain weights": (TextEngine(plain, **sizes), [None] * ROWS),
        "base beside adapters": (beside, [None] * ROWS),
        "adapters in turns": (beside, [([None, *names])[n % (1 + len(names))] for n in range(ROWS)]),
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(REPEATS + 1):
        for kind, (engine, wanted) in kinds.items():
            speed = write(engine, wanted, options.new)
            if repeat:  # the first one compiles
                speeds[kind].append(speed)
    base = statistics.median(speeds["plain weights"])
    print("| requests | tokens/s of processor time | of plain weights |")
    print("|---|---|---|")
    for kind, values in speeds.items():
        print(f"| {kind} | {statistics.median(values):.2f} | {statistics.median(values) / base:.2f} |")


if __name__ == "__main__":
    main()
