"""prove: a covering set of plans equals one device, and a plan that does not is found out."""

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.core import layout
from polyreme.distributed.pipeline import runtime
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.prove import prove
from polyreme.errors import ConfigError, NumericsError
from polyreme.mesh import SCHEDULES, Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.experts.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.models.families import ROUTINGS
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer import SGD, AdamW
from polyreme.training import StepPolicy
from tests.expert_workloads import WORKLOADS, choose

DATA = np.random.default_rng(0).integers(0, 128, (2, 8, 17))
BATCHES = [(rows[:, :-1], rows[:, 1:]) for rows in DATA]
BFLOAT16 = ("O1", "bfloat16"), ("O2", "bfloat16")


def build(family, num_layers=4):
    if family == "gpt":
        return GPT(GPTConfig.nano(num_layers=num_layers, dropout=0.1))
    if family.startswith("mixtral"):
        setting = family.partition(" ")[2]
        options = {"balance_scope": setting, "balance_loss": 0.1} if setting == "global_batch" else {}
        options |= {"routing": setting} if setting in ROUTINGS else {}
        return Mixtral(MixtralConfig.nano(num_layers=num_layers, num_experts=8, **options))
    if family == "deepseek_v3":
        # over stages with a dense layer and a module that predicts further
        sizes = {"num_layers": num_layers, "q_lora_rank": 12}
        sizes |= dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), num_layers // 2)
        return DeepseekV3(DeepseekV3Config.nano(**sizes, sequence_loss=0.1))
    return Llama(LlamaConfig.nano(num_layers=num_layers))


def adamw(model):
    return AdamW(1e-2, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(0.5))


def case(family, amp=None, slow=False, **degrees):
    name = "-".join([family, *([amp[0]] if amp else []), *(f"{k}={v}" for k, v in degrees.items())])
    return pytest.param(family, amp, degrees, id=name, marks=[pytest.mark.slow] if slow else [])


# Every value of every setting is here at least once; in the slow part, every schedule with every sharding stage.
CASES = [
    case("gpt", dp=2, pp=2, mp=2, num_microbatches=4),
    case("gpt", pp=2, sharding=2, mp=2, sharding_stage=3, schedule="ZBH1", num_microbatches=2, sequence_parallel=True),
    case("gpt", pp=2, sharding=4, sharding_stage=2, schedule="VPP", num_microbatches=2, recompute="full", slow=True),
    case(
        "gpt", BFLOAT16[1], slow=True, pp=2, sharding=2, mp=2, sharding_stage=1, schedule="FThenB", num_microbatches=2
    ),
    case("gpt", slow=True, dp=2, sharding=2, sep=2, sharding_stage=3, recompute="full_attn", num_microbatches=2),
    case("gpt", BFLOAT16[0], dp=2, sharding=2, mp=2, sharding_stage=2, recompute="core_attn", offload=("state",)),
    case("llama", pp=2, sep=2, sharding=2, sharding_stage=2, schedule="ZBVPP", num_microbatches=3),
    case("llama", slow=True, dp=2, sep=4, sep_attention="ring", recompute="full", offload=("act",)),
    case("llama", slow=True, mp=2, sharding=4, sharding_stage=1, sequence_parallel=True),
    case("llama", dp=2, sep=2, mp=2, sequence_parallel=True, overlap={"mp": "ring"}),
    case(
        "gpt",
        slow=True,
        pp=2,
        sharding=2,
        mp=2,
        sharding_stage=2,
        schedule="ZBH1",
        num_microbatches=2,
        sequence_parallel=True,
        overlap={"mp": "ring"},
    ),
    case("deepseek_v3", BFLOAT16[0], slow=True, mp=4, ep=2, sequence_parallel=True, overlap={"mp": "ring"}),
    case(
        "gpt",
        BFLOAT16[1],
        slow=True,
        pp=2,
        sharding=2,
        mp=2,
        sharding_stage=2,
        schedule="ZBH1",
        num_microbatches=2,
        overlap={"sharding": "ring"},
    ),
    case("mixtral", slow=True, sharding=4, ep=2, sharding_stage=3, recompute="full", overlap={"sharding": "ring"}),
    *[
        case(family, slow=True, pp=2, sharding=2, mp=2, sharding_stage=stage, schedule=schedule, num_microbatches=4)
        for family, stage in (("gpt", 1), ("llama", 2), ("gpt", 3))
        for schedule in SCHEDULES
    ],
    case("mixtral global_batch", dp=2, num_microbatches=2),
    case("mixtral global_batch", slow=True, pp=2, dp=2, ep=2, num_microbatches=2),
    case("mixtral global_batch", slow=True, sharding=2, ep=2, sharding_stage=2, num_microbatches=4, recompute="full"),
    case("mixtral global_batch", slow=True, pp=2, dp=2, ep=2, num_microbatches=2, schedule="ZBH1"),
    case(
        "mixtral expert_choice",
        sharding=2,
        sep=2,
        ep=2,
        sharding_stage=3,
        expert_axes=("sep", "ep"),
        expert_dispatch="padded",
    ),
    case("mixtral", slow=True, dp=2, mp=2, ep=2, recompute="full", expert_dispatch="padded"),
    case("mixtral hash", slow=True, pp=2, dp=2, ep=2, num_microbatches=2, recompute="full"),
    case("mixtral", slow=True, mp=2, sep=2, ep=2, expert_dispatch="padded", expert_axes=("sep", "ep")),
    case("mixtral expert_choice", slow=True, pp=2, dp=2, ep=2, num_microbatches=2, schedule="ZBH1"),
    case(
        "mixtral",
        slow=True,
        pp=2,
        sharding=2,
        ep=2,
        sharding_stage=2,
        num_microbatches=2,
        schedule="ZBH1",
        recompute="full",
        expert_dispatch="balanced",
    ),
    case("mixtral", slow=True, dp=2, mp=2, ep=2, sequence_parallel=True, expert_axes=("ep", "mp")),
    case("mixtral", slow=True, dp=2, mp=2, sharding=2, sharding_stage=1, expert_axes=("dp", "mp")),
    case("mixtral", BFLOAT16[1], slow=True, pp=2, sharding=2, ep=2, sharding_stage=2, num_microbatches=2),
    case("deepseek_v3", mp=2, ep=2),
    case("deepseek_v3", slow=True, mp=2, ep=2, sharding=2, sharding_stage=3),
    case("deepseek_v3", slow=True, pp=2, dp=2, ep=2, num_microbatches=2, schedule="ZBH1"),
    case("deepseek_v3", slow=True, mp=2, sep=2, ep=2, sequence_parallel=True, expert_axes=("ep", "mp")),
    case("deepseek_v3", BFLOAT16[1], slow=True, dp=2, sep=2, ep=2, sep_attention="ring", recompute="full"),
    case("gpt", slow=True, dp=8),
    case("llama", slow=True, mp=2, sep=2, pp=2, sep_attention="ring", schedule="1F1B", num_microbatches=2),
    case("llama", BFLOAT16[1], slow=True, pp=4, dp=2, schedule="ZBH1", num_microbatches=4, recompute="full"),
]


@pytest.mark.one_in(5)
@pytest.mark.slow_cases(
    "gpt-dp=2-pp=2-mp=2-num_microbatches=4",
    "gpt-pp=2-sharding=2-mp=2-sharding_stage=3-schedule=ZBH1-num_microbatches=2-sequence_parallel=True",
    "llama-pp=2-sep=2-sharding=2-sharding_stage=2-schedule=ZBVPP-num_microbatches=3",
)
@pytest.mark.parametrize(("family", "amp", "degrees"), CASES)
def test_plan_equals_one_device(family, amp, degrees):
    plan = Plan.from_degrees(**degrees)
    # rows that microbatches and data parallelism divide, uneven last microbatches apart
    rows = 8 // plan.num_microbatches * plan.num_microbatches
    batches = [(x[:rows], y[:rows]) for x, y in BATCHES]
    how = {"amp": amp} if amp else {"policy": StepPolicy(non_finite="halt")}  # as pretraining does
    proof = prove(
        lambda: build(family, plan.mesh.pp * plan.virtual_stages),  # one layer of a chunk has every kind of array
        plan,
        batches,
        optimizer=adamw,
        devices=jax.devices()[: plan.mesh.size],
        **how,
    )
    assert proof.holds, str(proof)
    compared = {d.what for d in proof.differences}
    assert compared == {
        "loss", "gradient", "weight", "optimizer state", "checkpoint of the plan", "checkpoint of one device"
    }  # fmt: skip
    assert "equals one device" in str(proof)
    assert layout.active.layout is None


class Routed(nn.Layer):
    """Experts chosen by the last numbers of each row."""

    def __init__(self, width=8, experts=8):
        super().__init__()
        self.width = width
        self.first, self.gates = nn.Linear(width, width), nn.Linear(width, experts, bias_attr=False)
        self.up = self.create_parameter([experts, width, 4], dims=("expert", "embed", "expert_ffn"))
        self.down = self.create_parameter([experts, 4, width], dims=("expert", "expert_ffn", "embed"))

    def forward(self, x, y):
        x, choices = self.first(x[..., : self.width]), x[..., self.width :].astype("int32")
        gates = paddle.take_along_axis(nn.functional.sigmoid(self.gates(x)), choices.clip(0), -1)
        return nn.functional.mse_loss(x + nn.functional.experts_ffn(x, choices, gates, self.up, self.down), y)


EXPERT_PLANS = [
    {"expert_dispatch": how, **degrees}
    for degrees in (
        {"dp": 2, "ep": 4},
        {"sharding": 2, "ep": 4, "sharding_stage": 3},
        {"dp": 2, "mp": 2, "ep": 2, "expert_axes": ("mp", "ep")},
        {"sep": 2, "sharding": 2, "ep": 2, "sharding_stage": 2, "expert_axes": ("sep", "ep")},
        {"dp": 2, "mp": 2, "ep": 2, "sharding_stage": 1},
    )
    for how in ("gather", "padded", "balanced")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(
            degrees,
            id="-".join(str(n) for n in degrees.values()),
            marks=[] if degrees == {"expert_dispatch": "balanced", "dp": 2, "ep": 4} else [pytest.mark.slow],
        )
        for degrees in EXPERT_PLANS
    ],
)
def test_every_workload_of_experts_equals_one_device(degrees):
    g = np.random.default_rng(2)
    batches = []
    for step, name in enumerate(WORKLOADS):
        x, y = g.standard_normal((2, 8, 4, 8), np.float32)
        batches.append((np.concatenate([x, choose(name, step=step, top_k=2)], -1, dtype=np.float32), y))
    plan = Plan.from_degrees(**degrees)
    proof = prove(Routed, plan, batches, optimizer=adamw, devices=jax.devices()[: plan.mesh.size])
    assert proof.holds, str(proof)


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.second(self.first(x)), y)


def small(count=1):
    g = np.random.default_rng(1)
    return [(g.standard_normal((8, 4), np.float32), g.standard_normal((8, 2), np.float32)) for _ in range(count)]


def sgd(model):
    return SGD(0.1, parameters=model.parameters())


def in_a_pipeline():
    return PipelineLayer([nn.Linear(4, 8), nn.Linear(8, 2)], num_stages=2, loss_fn=nn.MSELoss())


def test_a_wrong_gradient_is_found_and_named(monkeypatch):
    monkeypatch.setattr(runtime, "shares", lambda batch: (0.5, 0.5001))
    proof = prove(
        in_a_pipeline, Plan.from_degrees(pp=2, num_microbatches=2), small(), optimizer=sgd, devices=jax.devices()[:2]
    )
    assert not proof.holds
    # the loss is weighted by the same shares; 1e-4 of it is a thousand roundings
    assert proof.first_difference.what == "loss"
    assert {d.name for d in proof.differences if not d.holds and d.what == "gradient"} >= {"1.weight", "0.weight"}
    assert "NOT equal: first the loss" in str(proof)


class Counted(nn.Layer):
    """A batch norm, whose statistics are sums over the batch, and a count."""

    def __init__(self, step):
        super().__init__()
        self.norm, self.step = nn.BatchNorm1D(4), step
        self.register_buffer("count", paddle.zeros([1], dtype="int32"))

    def forward(self, x):
        self.count.set_value(self.count + self.step())
        return self.norm(x)


def test_buffers_that_the_forward_writes_are_compared():
    def proved(step):
        def build():
            return PipelineLayer([Counted(step), nn.Linear(4, 2)], num_stages=2, loss_fn=nn.MSELoss())

        plan = Plan.from_degrees(dp=2, pp=2, num_microbatches=2)
        return prove(build, plan, small(2), optimizer=sgd, devices=jax.devices()[:4])

    proof = proved(lambda: 1)
    assert proof.holds, str(proof)
    # one count too many where there are several devices
    first = proved(lambda: layout.active.layout.plan.mesh.dp).first_difference
    assert (first.what, first.name, first.error) == ("weight", "0.count", 2)


def test_a_wrong_update_is_found(monkeypatch):
    right = SGD.rule

    def wrong(self, p, g, lr, slots, scalars, options):
        factor = 1.001 if len(getattr(p, "aval", p).shape) == 2 and layout.active.layout.plan.mesh.dp > 1 else 1.0
        return right(self, p, g, lr * factor, slots, scalars, options)

    monkeypatch.setattr(SGD, "rule", wrong)
    proof = prove(Net, Plan.from_degrees(dp=2), small(), optimizer=sgd, devices=jax.devices()[:2])
    first = proof.first_difference
    assert (first.what, first.name, first.step) == ("weight", "first.weight", 1)


def test_other_random_numbers_are_found():
    class Noisy(Net):
        def forward(self, x, y):
            # a mask that depends on the mesh, as one drawn on each device by itself would
            ways = layout.active.layout.plan.mesh.dp
            return super().forward(x * (1 + 0.01 * ways * paddle.ones([1])), y)

    proof = prove(Noisy, Plan.from_degrees(dp=2), small(), optimizer=sgd, devices=jax.devices()[:2])
    assert proof.first_difference.what == "loss"


def test_rows_that_do_not_divide_are_proved_too():
    batches = [(x[:7], y[:7]) for x, y in small()]
    proof = prove(Net, Plan.from_degrees(dp=4, num_microbatches=2), batches, optimizer=sgd, devices=jax.devices()[:4])
    assert proof.holds, str(proof)


def test_what_cannot_be_proved_is_refused():
    x, y = small()[0]
    with pytest.raises(NumericsError, match="the loss of step 1 on one device is nan"):
        prove(Net, Plan(), [(x * np.nan, y)], optimizer=sgd, devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match="needs at least one batch"):
        prove(Net, Plan(), [], optimizer=sgd)
    with pytest.raises(ConfigError, match=r"prove: amp=.* beside a policy"):
        prove(Net, Plan(), small(), optimizer=sgd, amp=BFLOAT16[0], policy=StepPolicy())
    with pytest.raises(ConfigError, match="needs a model in chunks; make Net a PipelineLayer"):
        prove(Net, Plan.from_degrees(pp=2), small(), optimizer=sgd, devices=jax.devices()[:2])


def test_recompute_of_a_model_that_has_no_part_for_it_is_refused():
    with pytest.raises(
        ConfigError, match="recompute 'full', and Net does not say which of its parts to recompute in backward"
    ):
        prove(Net, Plan.from_degrees(dp=2, recompute="full"), small(), optimizer=sgd, devices=jax.devices()[:2])
