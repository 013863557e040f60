"""A plan chosen for a model that says nothing of devices."""

import re

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import amp, nn
from polyreme.distributed.auto_parallel.engine import choose
from polyreme.distributed.auto_parallel.engine.choose import choose_plan, cluster_of, training_of
from polyreme.distributed.placement import clear_plan, shard_batch
from polyreme.errors import ConfigError
from polyreme.hapi import InputSpec
from polyreme.optimizer import AdamW
from polyreme.planner import cluster_of_kind
from polyreme.planner.space import Space
from tests.distributed.auto_parallel.plain_models import Experts, Language

IDS = InputSpec([16, 12], "int64")


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


def test_the_chosen_plan_runs_and_is_explained():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    x = np.random.RandomState(0).randn(16, 6).astype("float32")
    want = model(paddle.to_tensor(x)).numpy()
    chosen = choose_plan(model, [x], space=Space(axes=("dp", "mp"), sharding_stages=(1,)))
    chosen.plans = tuple(each for each in chosen.plans if each.plan.mesh.mp == 2)
    assert "mp2" in str(chosen)
    layout = chosen.apply()
    got = model(shard_batch(layout, x, "batch", None))
    assert np.allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)
    assert model[0].weight._array.addressable_shards[0].data.shape == (6, 4)


@pytest.mark.slow
def test_the_report_says_plans_and_what_they_cost():
    chosen = choose_plan(Language(("separate",) * 4), [IDS], batch=64, cluster=cluster_of_kind("a100-80g", 8))
    text = str(chosen)
    fastest = min(p.prediction.step_seconds for p in chosen.plans)
    assert chosen.plans[0].prediction.step_seconds <= fastest * 1.01  # of equals the simpler goes first
    for part in ("Language: ", "batch 64 on 8 x A100", "predicted: arithmetic", "of 72.8 GiB a device", "binds",
                 "plans, best first", "blocks.*.attention.q.weight (4)", "embed, heads"):  # fmt: skip
        assert part in text, part
    assert all(each.plan.mesh.ep == 1 and each.plan.mesh.sep == 1 for each in chosen.plans)


def test_nothing_fits():
    small = cluster_of_kind("a100-80g", 8)
    tiny = small.__class__(small.device.__class__(**{
        **{name: getattr(small.device, name) for name in small.device.__slots__}, "memory": 2e3,
    }), 8, small.links)  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"no plan trains Language with batch 16 on 8 devices: the smallest, .* needs"
    ):
        choose_plan(Language(), [IDS], cluster=tiny)
    with pytest.raises(ConfigError, match=r"batch 3 does not divide"):
        choose_plan(Language(), [IDS], batch=3, space=Space(axes=("dp",)))
    with pytest.raises(ConfigError, match="leave the batch open; give batch="):
        choose_plan(Language(), [InputSpec([None, 12], "int64")])


def test_experts_may_be_split():
    chosen = choose_plan(Experts(), [InputSpec([16, 6, 8])], space=None)
    assert "ep" in choose.space_of(chosen).axes
    assert "ep" not in choose.space_of(choose_plan(Language(), [IDS])).axes


def test_how_a_step_computes():
    model = nn.Linear(4, 4)
    assert (training_of(model).dtype, training_of(model).master) == ("float32", False)
    with amp.auto_cast(dtype="bfloat16"):
        assert (training_of(model).dtype, training_of(model).master) == ("bfloat16", False)
    model.bfloat16()
    optimizer = AdamW(0.1, parameters=model.parameters(), multi_precision=True)
    assert (training_of(model, optimizer).dtype, training_of(model, optimizer).master) == ("bfloat16", True)


def test_blocks_are_run_again_where_the_plan_says_so():
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 6), *blocks)
    x = paddle.to_tensor(np.random.RandomState(0).randn(16, 4).astype("float32"))
    chosen = choose_plan(model, [x], space=Space(axes=("dp",), recompute=("full",)))
    assert chosen.plan.recompute == "full"
    model(x).sum().backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    model.clear_gradients(set_to_zero=False)
    chosen.prepare()
    ran = []
    blocks[0][1].register_forward_post_hook(lambda *_: ran.append(1))
    model(x).sum().backward()
    assert len(ran) == 2
    for name, p in model.named_parameters():
        assert np.allclose(p.grad.numpy(), grads[name], rtol=1e-5, atol=1e-6), name


def test_a_pipeline_is_left_to_the_engine():
    chosen = choose_plan(
        Language(("separate",) * 4), [IDS], cluster=cluster_of_kind("a100-80g", 8),
        space=Space(axes=("pp", "dp"), schedules=("1F1B",), recompute=("none",), offload=((),)),
    )  # fmt: skip
    staged = [each for each in chosen.plans if each.plan.mesh.pp > 1]
    assert staged
    chosen.plans = tuple(staged)
    with pytest.raises(ConfigError, match=re.escape("stages, which run task by task; give the model to an Engine")):
        chosen.apply()


def test_what_is_known_of_devices():
    class Device:
        platform = "gpu"

        def __init__(self, kind):
            self.device_kind = kind

    assert cluster_of([Device("NVIDIA H100 80GB HBM3")] * 8).device.name.startswith("H100")
    assert cluster_of([Device("TPU v5 lite")] * 4).device.name == "TPU-v5e"
    assert cluster_of([Device("NVIDIA A100-SXM4-80GB")] * 8).device.name.startswith("A100-SXM4-80GB")  # not an A10
    assert cluster_of(jax.devices()).num_devices == 8
