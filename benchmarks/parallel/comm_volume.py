"""Bytes that collectives move in a training step, by the compiled program's HLO and by formula, for a table of plans.

    python benchmarks/parallel/comm_volume.py [--save NAME]

The formulas are in polyreme/distributed/comm_report/volume.py. Fails if a plan is off by more than 2%, or has a
collective that the formula does not name.
"""

import argparse

import steps as s

from polyreme.distributed.comm_report import PipelineReport, Report, examine, workload_of
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.planning import communication

TOLERANCE = 0.02
PLANS = {
    "dp8": {"dp": 8},
    "sharding8, stage 1": {"sharding": 8, "sharding_stage": 1},
    "sharding8, stage 2": {"sharding": 8, "sharding_stage": 2},
    "sharding8, stage 3": {"sharding": 8, "sharding_stage": 3},
    "dp2 sharding4, stage 1": {"dp": 2, "sharding": 4, "sharding_stage": 1},
    "dp4 mp2": {"dp": 4, "mp": 2},
    "dp2 mp4, sequence parallel": {"dp": 2, "mp": 4, "sequence_parallel": True},
    "dp2 sharding2 mp2, stage 3": {"dp": 2, "sharding": 2, "mp": 2, "sharding_stage": 3},
    "sharding4 mp2, stage 3, sequence parallel": {
        "sharding": 4, "mp": 2, "sharding_stage": 3, "sequence_parallel": True,
    },
    "dp4 sep2, Ulysses": {"dp": 4, "sep": 2, "sep_attention": "ulysses"},
    "dp2 sep4, ring": {"dp": 2, "sep": 4, "sep_attention": "ring"},
    "sharding2 sep2 mp2, stage 2": {"sharding": 2, "sep": 2, "mp": 2, "sharding_stage": 2, "sep_attention": "ulysses"},
}  # fmt: skip
# these with 4 layers and two microbatches
PIPELINES = {
    "pp2 dp2 mp2, 1F1B": {"pp": 2, "dp": 2, "mp": 2},
    "pp4 dp2, 1F1B": {"pp": 4, "dp": 2},
    "pp2 sharding2 mp2, stage 1, 1F1B": {"pp": 2, "sharding": 2, "mp": 2, "sharding_stage": 1},
    "pp2 sharding2 mp2, stage 2, VPP": {
        "pp": 2,
        "sharding": 2,
        "mp": 2,
        "sharding_stage": 2,
        "schedule": "VPP",
        "virtual_stages": 2,
    },
    "pp2 sharding2 mp2, stage 3, 1F1B": {"pp": 2, "sharding": 2, "mp": 2, "sharding_stage": 3},
    "pp2 sharding2 mp2, stage 3, ZBH1": {"pp": 2, "sharding": 2, "mp": 2, "sharding_stage": 3, "schedule": "ZBH1"},
    "pp2 dp2 mp2, ZBVPP": {"pp": 2, "dp": 2, "mp": 2, "schedule": "ZBVPP", "virtual_stages": 2},
    "pp2 dp2 mp2, ZBH1, sequence parallel": {
        "pp": 2,
        "dp": 2,
        "mp": 2,
        "schedule": "ZBH1",
        "sequence_parallel": True,
    },
}
SIZES = {
    "gpt": {"hidden_size": 64, "num_heads": 8, "seq_len": 32, "vocab_size": 512},
    "llama": {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 192, "seq_len": 32, "vocab_size": 512},
}


def examined(family: str, degrees: dict) -> Report:
    """The report of a step under a plan without pipeline stages."""
    plan = s.Plan.from_degrees(**degrees)
    step = s.Step(family, plan, **SIZES[family])
    work = workload_of(step.model, step.batch, step.model.config.seq_len)
    return examine([(step.compiled().as_text(), 1)], plan, work, "cpu")


def examined_stages(family: str, degrees: dict) -> Report | PipelineReport:
    """The report of a step over pipeline stages."""
    s.clear_plan()
    model = {"family": family, "num_layers": 4, **SIZES[family]}
    train = {"global_batch": 16, "accumulation": 2}
    return communication.report(PretrainConfig.model_validate({"model": model, "train": train, "plan": degrees}))


def row(family: str, name: str, found: Report | PipelineReport) -> tuple:
    """One line of the table; ends the program if the plan misses its formula."""
    worst = max((abs(t.ratio - 1) for t in found.totals if t.measured or t.expected), default=0.0)
    if found.unnamed or worst > TOLERANCE:
        raise SystemExit(f"{family}, {name}: not what the formula says\n{found.as_text()}")
    whole = found.whole
    sizes = (f"{whole.measured / 1024:,.1f}", f"{whole.expected / 1024:,.1f}", f"{whole.measured / whole.expected:.4f}")
    reports = found.stages if isinstance(found, PipelineReport) else (found,)
    rows = sum(len(report.collectives) for report in reports)
    return (family, name, rows, *sizes, f"{worst:.2%}", f"{whole.bound / 1024:,.1f}")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/NAME.md")
    options = parser.parse_args()
    rows: list[tuple] = [
        ("model", "plan", "rows", "KiB, HLO", "KiB, formula", "ratio", "worst kind and axes", "KiB, lower bound")
    ]
    for family in SIZES:
        for plans, look in ((PLANS, examined), (PIPELINES, examined_stages)):
            for name, degrees in plans.items():
                rows.append(row(family, name, look(family, degrees)))
                print(*rows[-1], sep="  ", flush=True)
    text = s.markdown(rows)
    if options.save:
        what = (
            "Wire bytes that one device sends in a training step (2 layers, 64 wide, batch 16 x 32, vocabulary 512, "
            "float32, AdamW, clipped by global norm) over 8 virtual CPU devices. XLA's CPU compiler has no "
            "reduce-scatter and joins no sums of all-reduces, which the formula for it counts; the lower bound has "
            "both. Pipelines (pp) have 4 layers and two microbatches; their bytes are the mean over all devices, "
            "what stages send each other included."
        )
        print(s.save(options.save, "Collective volume against the formula", what, text))


if __name__ == "__main__":
    main()
