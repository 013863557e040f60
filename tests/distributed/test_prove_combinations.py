"""Plans drawn from all that they can say at once: each equals one device.

test_prove.py has each word of a plan at least once; here dispatchers, foldings, sharding stages, schedules, ways of
attention, overlap, recompute, offload, precision, adapters and rows of several documents meet as they come.
"""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from polyreme.distributed.placement import clear_plan
from polyreme.distributed.prove import prove
from polyreme.mesh import SCHEDULES, Plan
from polyreme.models.adapters import add_adapters
from polyreme.models.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.gpt import GPT, GPTConfig
from polyreme.models.llama import Llama, LlamaConfig
from polyreme.models.mixtral import Mixtral, MixtralConfig
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.layers.lora import LoRA
from polyreme.optimizer import AdamW
from polyreme.recipes.training.trainer import num_counted
from tests.distributed.test_packed_stages import packed_rows

FAMILIES = {"gpt": (GPT, GPTConfig), "llama": (Llama, LlamaConfig), "mixtral": (Mixtral, MixtralConfig)}
FAMILIES |= {"deepseek_v3": (DeepseekV3, DeepseekV3Config)}
EXPERTS, DOCUMENTS = ("mixtral", "deepseek_v3"), ("gpt", "llama", "mixtral")
PLAIN = np.random.default_rng(0).integers(0, 128, (8, 17))


@st.composite
def jobs(draw):
    """(family, sizes of its model, words of a plan, amp, whether documents share rows, whether adapters train)."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    has_experts = family in EXPERTS
    axes = ("dp", "pp", "sharding", "sep", "mp", *(("ep",) if has_experts else ()))
    degrees = dict.fromkeys(draw(st.lists(st.sampled_from(axes), min_size=2, max_size=3, unique=True)), 2)
    words, sizes = {**degrees}, {}
    if "sharding" in degrees:
        words["sharding_stage"] = draw(st.integers(1, 3))
    if "pp" in degrees:
        words["schedule"] = draw(st.sampled_from(sorted(SCHEDULES)))
        words["num_microbatches"] = draw(st.sampled_from((2, 4)))
    else:
        words["num_microbatches"] = draw(st.sampled_from((1, 2)))
    if "sep" in degrees:
        words["sep_attention"] = draw(st.sampled_from(("auto", "ulysses", "ring", "gather")))
        words["sep_order"] = draw(st.sampled_from(("auto", "zigzag", "contiguous")))
    overlap = {}
    if "mp" in degrees and draw(st.booleans()):
        words["sequence_parallel"] = True
        overlap["mp"] = draw(st.sampled_from(("none", "ring")))
    if words.get("sharding_stage", 0) > 1:
        overlap["sharding"] = draw(st.sampled_from(("none", "ring")))
    if has_experts:
        folded = [("ep",), *(("ep", axis) for axis in ("mp", "dp", "sharding", "sep"))]
        folded += [(axis,) for axis in ("dp", "mp", "sep")]
        usable = [names for names in folded if set(names) <= set(degrees) and ("ep" in degrees) == ("ep" in names)]
        if usable:
            words["expert_axes"] = draw(st.sampled_from(usable))
            words["expert_dispatch"] = draw(st.sampled_from(("auto", "gather", "padded", "balanced")))
            overlap["moe"] = draw(st.sampled_from((1, 2)))
    if family == "mixtral":
        sizes["routing"] = draw(st.sampled_from(("token_choice", "hash")))
    words["overlap"] = overlap
    words["recompute"] = draw(st.sampled_from(("none", "core_attn", "full_attn", "full")))
    tiers = [(), ("state",), *([("act",), ("state", "act")] if words["recompute"] != "none" else [])]
    amp = draw(st.sampled_from((None, ("O1", "bfloat16"), ("O2", "bfloat16"))))
    if "pp" not in degrees and amp is None:
        tiers += [{"param": "host", "state": "host"}]
        tiers += [{"expert": "host"}] if family in EXPERTS else []
    words["offload"] = draw(st.sampled_from(tiers))
    shares_rows = family in DOCUMENTS and draw(st.booleans())
    has_adapters = "param" not in words["offload"] and "expert" not in words["offload"] and draw(st.booleans())
    return family, sizes, words, amp, shares_rows, has_adapters


def check(family, sizes, words, amp, shares_rows, has_adapters):
    """Two steps of a job, against the same on one device."""
    plan = Plan.from_degrees(**words)
    model, config = FAMILIES[family]
    layers = max(2, plan.mesh.pp * plan.virtual_stages)
    sizes = {"num_layers": layers, **({"num_experts": 8} if family in EXPERTS else {}), **sizes}

    def build():
        built = model(config.nano(**sizes))
        if has_adapters:
            add_adapters(built, LoRA(rank=2))
        return built

    batch = packed_rows(1) if shares_rows else (PLAIN[:, :-1], PLAIN[:, 1:])
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
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(job=jobs())
def test_plans_as_they_come_equal_one_device(job):
    event(job[0])
    try:
        check(*job)
    finally:
        clear_plan()
