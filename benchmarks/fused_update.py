"""AdamW's update, clipped by the global norm, of the tensors of 52 Evoformer blocks: one by one, or stacked.

    python benchmarks/fused_update.py [--blocks 52] [--rounds 15] [--one-program]

The blocks are narrow, so that what counts is what a tensor costs, not its bytes. `one by one` is a call of a compiled
program for each tensor, as the first updates of an eager run are; `one program` is what those become, and what a
captured step of a list of blocks has in it (minutes to compile: ask for it with few blocks); `stacked` is one program
over the parameters of nn.Stacked, which hold all blocks' along their first dim. All see the same gradients and must
give the same parameters. Sides take turns; medians, of the clock and of processor time.
"""

import argparse
import statistics
import time

import jax
import numpy as np

import polyreme as pr
from polyreme.models.encoders.evoformer import EvoformerBlock, EvoformerConfig
from polyreme.nn import ClipGradByGlobalNorm, Stacked
from polyreme.optimizer import AdamW, update_by_kind
from polyreme.optimizer import optimizer as optimizer_module

NEVER = 10**9  # updates before the whole program takes over


def optimizer_of(parameters):
    """AdamW over these parameters."""
    return AdamW(1e-3, parameters=parameters, grad_clip=ClipGradByGlobalNorm(1.0))


def set_gradients(parameters, values):
    """Give parameters these gradients."""
    for p, value in zip(parameters, values, strict=True):
        p._grad = pr.to_tensor(value)


class Side:
    """Parameters with gradients, their optimizer, and what its updates took so far."""

    def __init__(self, parameters, gradients):
        self.parameters = parameters
        self.optimizer = optimizer_of(parameters)
        set_gradients(parameters, gradients)
        self.clock, self.processor = [], []

    def update(self):
        """One update, waited for."""
        clock, processor = time.perf_counter(), time.process_time()
        self.optimizer.step()
        jax.block_until_ready([p._array for p in self.parameters])
        self.clock.append(1e3 * (time.perf_counter() - clock))
        self.processor.append(1e3 * (time.process_time() - processor))


def main():
    """Print a row for each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=52)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one-program", action="store_true")
    options = parser.parse_args()
    config = EvoformerConfig.nano()
    pr.seed(0)
    stack = Stacked(lambda: EvoformerBlock(config), options.blocks)
    stacked = list(stack.parameters())
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(p.shape).astype(np.float32) for p in stacked]
    # by block, then by tensor, as a list of blocks has them
    apart = [pr.nn.Parameter(p.numpy()[at]) for at in range(options.blocks) for p in stacked]
    slices = [g[at] for at in range(options.blocks) for g in gradients]
    print(f"{len(apart)} tensors, {sum(p.size for p in apart):,} elements; stacked {len(stacked)} tensors")

    sides = {}
    update_by_kind.STEPS_BY_KIND = NEVER
    by_kind = optimizer_module.is_worthwhile
    sides["one by one"] = Side(apart, slices)
    if options.one_program:
        sides["one program"] = Side([pr.nn.Parameter(p.numpy()) for p in apart], slices)
    sides["stacked"] = Side(stacked, gradients)
    for name, side in sides.items():
        optimizer_module.is_worthwhile = by_kind if name == "one by one" else lambda *_: False
        side.update()
    first = {name: side.clock.pop() for name, side in sides.items()}
    for side in sides.values():
        side.processor.pop()
    for _ in range(options.rounds):
        for side in sides.values():
            side.update()
    last = [p.numpy() for p in apart]
    if options.one_program:
        for p, value in zip(sides["one program"].parameters, last, strict=True):
            np.testing.assert_array_equal(p.numpy(), value)
    for number, p in enumerate(stacked):
        whole = np.stack([last[at * len(stacked) + number] for at in range(options.blocks)])
        np.testing.assert_allclose(p.numpy(), whole, rtol=1e-5, atol=1e-6)  # the norm is added up in another order
    base = sides["one by one"]
    print(f"{'side':12} {'first, s':>9} {'clock, ms':>10} {'processor, ms':>14}  one by one / this: clock, processor")
    for name, side in sides.items():
        clock, processor = statistics.median(side.clock), statistics.median(side.processor)
        print(
            f"{name:12} {first[name] / 1e3:9.1f} {clock:10.1f} {processor:14.1f}  "
            f"{statistics.median(base.clock) / clock:.1f}  {statistics.median(base.processor) / processor:.1f}"
        )


if __name__ == "__main__":
    main()
