"""Bytes that one device holds of parameters, gradients and optimizer state under each ZeRO stage, against 1/N.

    python benchmarks/parallel/sharding_bytes.py [--save NAME]

Counted on what compiled programs take and leave: the step's own arguments (memory_analysis of the executable), and the
arrays that a compiled step and a compiled backward leave behind. Fails if a stage misses 1/N by one byte.
"""

import argparse

import steps as s

WAYS = s.DEVICES
SPLIT = {0: (), 1: ("state",), 2: ("grad", "state"), 3: ("param", "grad", "state")}


def on_one_device(arrays: list) -> int:
    """Bytes of these arrays that lie on the first device."""
    return sum(a.addressable_shards[0].data.nbytes for a in arrays)


def measure(stage: int) -> dict[str, int]:
    """Bytes on one device by kind, and of all the step's arguments."""
    plan = s.Plan.from_degrees(sharding=WAYS, sharding_stage=stage) if stage else s.Plan.from_degrees(dp=WAYS)
    step = s.Step("gpt", plan)
    arguments = step.compiled().memory_analysis().argument_size_in_bytes
    step()
    slots = [t._array for n, t in step.optimizer.state_dict().items() if "_moment" in n]
    step.backward(*step.arguments)
    parameters = step.model.parameters()
    return {
        "param": on_one_device([p._array for p in parameters]),
        "grad": on_one_device([p.grad._array for p in parameters]),
        "state": on_one_device(slots),
        "arguments": arguments,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    whole = measure(0)
    rows: list[tuple] = [("stage", "parameters", "gradients", "optimizer state", "arguments of the step")]
    rows.append(("none", *(f"{whole[k]:,}" for k in ("param", "grad", "state", "arguments"))))
    for stage in (1, 2, 3):
        nbytes = measure(stage)
        for kind in ("param", "grad", "state"):
            want = whole[kind] // WAYS if kind in SPLIT[stage] else whole[kind]
            if nbytes[kind] != want:
                raise SystemExit(f"stage {stage}: {kind} is {nbytes[kind]} bytes on a device, 1/N is {want}")
        cells = [f"{nbytes[k]:,} (1/{whole[k] / nbytes[k]:g})" for k in ("param", "grad", "state")]
        rows.append((stage, *cells, f"{nbytes['arguments']:,}"))
    text = s.markdown(rows)
    print(text)
    if options.save:
        what = f"GPT (nano), AdamW, float32, over {WAYS} virtual CPU devices. Bytes on one device."
        print(s.save(options.save, "Bytes a device under grouped sharding", what, text))


if __name__ == "__main__":
    main()
