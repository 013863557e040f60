"""Plans drawn from all that they can say at once: each equals one device.

test_prove.py has each word of a plan at least once; here dispatchers, foldings, sharding stages, schedules, ways of
attention, overlap, recompute, offload, precision, adapters and rows of several documents meet as they come. A seed is a
job; further ones are as good. Those that run have every word between them. Axes multiply up to the devices there are:
CPU_NUM=16 in the environment gives other jobs than the usual 8.
"""

import random
from itertools import chain

import jax
import numpy as np
import pytest

from polyreme.distributed.placement import clear_plan
from polyreme.distributed.prove import prove
from polyreme.mesh import SCHEDULES, Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.experts.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.models.files.adapters import add_adapters
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.layers.lora import LoRA
from polyreme.optimizer import AdamW
from polyreme.recipes.training.trainer import num_counted
from tests.distributed.test_packed_stages import packed_rows

FAMILIES = {
    "gpt": (GPT, GPTConfig),
    "llama": (Llama, LlamaConfig),
    "mixtral": (Mixtral, MixtralConfig),
    "deepseek_v3": (DeepseekV3, DeepseekV3Config),
}
EXPERTS, DOCUMENTS = ("mixtral", "deepseek_v3"), ("gpt", "llama", "mixtral")
PLAIN = np.random.default_rng(0).integers(0, 128, (32, 17))


def draw_degrees(draw, family, devices):
    """Degrees of two to four axes, 2 or sometimes 4, of at most so many devices."""
    axes = ("dp", "pp", "sharding", "sep", "mp", *(("ep",) if family in EXPERTS else ()))
    degrees, left = {}, devices
    for axis in draw.sample(axes, draw.choice((2, 3, 4))):
        # of usp both factors are above 1
        degree = min(left, 4 if axis == "sep" and draw.random() < 0.4 else 2)
        if degree > 1:
            degrees[axis], left = degree, left // degree
    return degrees


def draw_job(seed, devices):
    """-> family, sizes of its model, words of a plan, amp, whether documents share rows, whether adapters train."""
    draw = random.Random(seed)
    family = draw.choice(sorted(FAMILIES))
    has_experts = family in EXPERTS
    degrees = draw_degrees(draw, family, devices)
    words, sizes, overlap = {**degrees}, {}, {}
    if "sharding" in degrees:
        words["sharding_stage"] = draw.choice((1, 2, 3))
    if "pp" in degrees:
        words |= {"schedule": draw.choice(sorted(SCHEDULES)), "num_microbatches": draw.choice((2, 4))}
    else:
        words["num_microbatches"] = draw.choice((1, 2))
    if "sep" in degrees:
        usp = ("usp",) if degrees["sep"] == 4 else ()
        words["sep_attention"] = draw.choice(("auto", "ulysses", "ring", "gather", *usp))
        order = draw.choice(("auto", "zigzag", "contiguous"))
        if words["sep_attention"] == "ulysses" and degrees["sep"] * degrees.get("mp", 1) == 8:
            words["sep_attention"] = "usp"  # of 4 heads
        words["sep_order"] = "auto" if words["sep_attention"] == "ulysses" else order  # which has no use for one
        if words["sep_attention"] in ("ulysses", "usp") and family in ("llama", "mixtral"):
            sizes["num_kv_heads"] = 4
    if "mp" in degrees and draw.random() < 0.5:
        words["sequence_parallel"] = True
        overlap["mp"] = draw.choice(("none", "ring"))
    if words.get("sharding_stage", 0) > 1:
        overlap["sharding"] = draw.choice(("none", "ring"))
    if has_experts:
        folded = [("ep",), *(("ep", axis) for axis in ("mp", "dp", "sharding", "sep")), ("dp",), ("mp",), ("sep",)]
        usable = [names for names in folded if set(names) <= set(degrees) and ("ep" in degrees) == ("ep" in names)]
        if usable:
            words["expert_axes"] = draw.choice(usable)
            words["expert_dispatch"] = draw.choice(("auto", "gather", "padded", "balanced"))
            overlap["moe"] = draw.choice((1, 2))
    if family == "mixtral":
        sizes["routing"] = draw.choice(("token_choice", "hash"))
    words |= {"overlap": overlap, "recompute": draw.choice(("none", "core_attn", "full_attn", "full"))}
    amp = draw.choice((None, ("O1", "bfloat16"), ("O2", "bfloat16")))
    tiers = [(), (), ("state",), *([("act",), ("state", "act")] if words["recompute"] != "none" else [])]
    if "pp" not in degrees and amp is None:
        tiers += [{"param": "host", "state": "host"}, *([{"expert": "host"}] if has_experts else [])]
    words["offload"] = draw.choice(tiers)
    shares_rows = family in DOCUMENTS and draw.random() < 0.5
    streams = "param" in words["offload"] or "expert" in words["offload"]
    # an adapter has the names of published weights, and tokens that an id sends have none
    can_adapt = not streams and sizes.get("routing") != "hash"
    has_adapters = can_adapt and draw.random() < 0.4
    if "pp" not in degrees and not streams:
        words["compile"] = draw.choice(("step", "blocks"))
    return family, sizes, words, amp, shares_rows and not streams, has_adapters


def words_of(seed, devices):
    """What a job says, as a set of text."""
    family, sizes, plan, amp, *switches = draw_job(seed, devices)
    said = {"family": family, **sizes, **plan, **plan["overlap"], "amp": amp, "switches": switches}
    if family in EXPERTS and "sep" in plan:
        said["attention beside experts"] = plan["sep_attention"]
    if plan.get("compile") == "blocks":
        said["in blocks"] = plan["offload"], family in EXPERTS
    return {f"{name}={value}" for name, value in said.items() if name != "overlap"}


def covering_seeds(devices):
    """Seeds whose jobs have every word that any of 300 has: at each turn the one with most words that are new."""
    words = {seed: words_of(seed, devices) for seed in range(300)}
    missing, seeds = set(chain.from_iterable(words.values())), []
    while missing:
        seeds.append(max(words, key=lambda seed: (len(words[seed] & missing), -seed)))
        missing -= words[seeds[-1]]
    return seeds


def check(family, sizes, words, amp, shares_rows, has_adapters):
    """Two steps of a job, against the same on one device."""
    plan = Plan.from_degrees(**words)
    model, config = FAMILIES[family]
    sizes = {**sizes, "num_layers": max(2, plan.mesh.pp * plan.virtual_stages)}
    sizes |= {"num_experts": 8} if family in EXPERTS else {}

    def build():
        built = model(config.nano(**sizes))
        if has_adapters:
            add_adapters(built, LoRA(rank=2))
        return built

    rows = max(8, plan.num_microbatches * plan.batch_ways)
    plain = PLAIN[:rows, :-1], PLAIN[:rows, 1:]
    batch = [np.concatenate([a] * (rows // 8)) for a in packed_rows(1)] if shares_rows else plain
    proof = prove(
        build,
        plan,
        [batch, batch],
        optimizer=lambda m: AdamW(1e-2, parameters=m.parameters(), grad_clip=ClipGradByGlobalNorm(0.5)),
        amp=amp,
        devices=jax.devices()[: plan.mesh.size],
        count=num_counted if shares_rows else None,
    )
    assert proof.holds, str(proof)


@pytest.mark.slow
@pytest.mark.parametrize("seed", covering_seeds(jax.device_count()))
def test_a_plan_as_it_comes_equals_one_device(seed):
    try:
        check(*draw_job(seed, jax.device_count()))
    finally:
        clear_plan()
