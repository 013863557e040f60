"""What hides the collectives of steps compiled for eight TPU v5e, which need not be here: bytes by kind and by whether
the forward or the backward sends them. Takes libtpu.

    python benchmarks/overlap.py

overlapped, free and critical are as polyreme comm has them.
"""

import sys
from collections import defaultdict
from pathlib import Path

from polyreme.recipes import config_file
from polyreme.recipes.planning import communication

CONFIGS = Path(__file__).parent.parent / "configs"
ONE_AXIS = {"dp": 1, "pp": 1, "mp": 1, "sharding": 1, "sharding_stage": 0}
WIDE = {"hidden_size": 1024, "ffn_size": 4096, "num_layers": 2, "num_heads": 8}
EXPERTS = {"seq_len": 1024, "global_batch": 32, "ep": 8}
CASES = {
    "experts, padded": ("moe_kjv", {**EXPERTS, "expert_dispatch": "padded"}),
    "experts, padded, 2 parts": ("moe_kjv", {**EXPERTS, "expert_dispatch": "padded", "overlap": "{moe: 2}"}),
    "experts, padded, 4 parts": ("moe_kjv", {**EXPERTS, "expert_dispatch": "padded", "overlap": "{moe: 4}"}),
    "experts, ragged": ("moe_kjv", {**EXPERTS, "expert_dispatch": "ragged"}),
    "experts, ragged, 2 parts": ("moe_kjv", {**EXPERTS, "expert_dispatch": "ragged", "overlap": "{moe: 2}"}),
    "ZeRO 3": ("gpt_kjv", {"seq_len": 512, "global_batch": 16, "sharding": 8, "sharding_stage": 3}),
    "ZeRO 3, 4096 tokens": ("gpt_kjv", {"seq_len": 512, "global_batch": 64, "sharding": 8, "sharding_stage": 3}),
    "ZeRO 3, 4096 tokens, rings": (
        "gpt_kjv",
        {"seq_len": 512, "global_batch": 64, "sharding": 8, "sharding_stage": 3, "overlap": "{sharding: ring}"},
    ),
    # keys of 4096 positions on a device, which it takes longer to attend to than to send
    "ring attention": (
        "gpt_kjv",
        {"seq_len": 32768, "global_batch": 1, "num_layers": 1, "sep": 8, "sep_attention": "ring"},
    ),
}
SECTIONS = {"model": ("seq_len", *WIDE), "train": ("global_batch", "accumulation", "amp_level")}


def settings(values):
    """Overrides of a configuration, dotted."""
    for name, value in {**WIDE, **ONE_AXIS, "accumulation": 1, "amp_level": "O2", **values}.items():
        section = next((section for section, names in SECTIONS.items() if name in names), "plan")
        yield f"{section}.{name}={value}"


def main():
    """Print a row for each kind of collective that moves a MiB or more; names given in words alone, else all."""
    print(f"{'step':26} {'collective':20} {'when':10} {'MiB a step':>10}  overlapped    free  critical")
    for name, (config, values) in CASES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        loaded = config_file.load(CONFIGS / f"{config}.yaml", list(settings(values)))
        moved = defaultdict(lambda: defaultdict(float))
        for c in communication.report(loaded.config, topology="v5e:2x4").collectives:
            moved[c.kind, c.parts[0].origin.phase][c.overlap] += c.total_wire / 2**20
        for (kind, phase), by_overlap in sorted(moved.items()):
            total = sum(by_overlap.values())
            if total >= 1:
                shares = [by_overlap[overlap] / total for overlap in ("overlapped", "free", "critical")]
                print(
                    f"{name:26} {kind:20} {phase:10} {total:10.1f}  " + "  ".join(f"{share:8.0%}" for share in shares),
                    flush=True,
                )


if __name__ == "__main__":
    main()
