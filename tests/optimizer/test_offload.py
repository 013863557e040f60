"""Optimizer state in host memory between steps: the same bits as without, on one device and on any mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import polyreme.optimizer as opt
from polyreme.amp import decorate
from polyreme.core import layout, rng, state
from polyreme.distributed import placement
from polyreme.distributed.checkpoint.store import CheckpointStore
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import PlacementError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from tests.compilations import counted_compilations

STEPS = 3
MESHES = {
    "one": {},
    "one_by_a_plan": {"dp": 1},
    "zero1": {"sharding": 4, "dp": 2, "sharding_stage": 1},
    "zero2_mp": {"sharding": 4, "mp": 2, "sharding_stage": 2},
    "zero3": {"sharding": 4, "dp": 2, "sharding_stage": 3},
}


class Net(Layer):
    def __init__(self):
        super().__init__()
        self.up = Linear(8, 16, dims=("embed", "ffn"))
        self.down = Linear(16, 8, dims=("ffn", "embed"))
        self.gain = self.create_parameter([])

    def forward(self, x):
        return self.down(self.up(x).tanh()) * self.gain


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    clear_plan()


class Run:
    """A small model and its step; offload through the plan, or on one device through `layouts`."""

    def __init__(self, mesh, offload, amp=False, captured=True):
        rng.seed(3)
        self.model = Net()
        if mesh:
            plan = Plan.from_degrees(**mesh, offload=("state",) if offload else ())
            apply_plan(plan, self.model, jax.devices()[: plan.mesh.size])
        elif offload:
            for p in self.model.parameters():
                p.layouts = {"state": SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")}
        self.optimizer = opt.AdamW(
            0.01, parameters=self.model.parameters(), grad_clip=ClipGradByGlobalNorm(0.1), multi_precision=amp
        )
        if amp:
            decorate(self.model, self.optimizer, level="O2", dtype="bfloat16")
        self.dtype = "bfloat16" if amp else "float32"
        self.step = to_static(self._step) if captured else self._step

    def _step(self, x, skip):
        (self.model(x.astype(self.dtype)) ** 2).mean().astype("float32").backward()
        self.optimizer.step(skip=skip)
        self.optimizer.clear_grad()

    def steps(self, steps=range(STEPS)):
        for i in steps:
            x = np.random.default_rng(i).normal(size=(8, 8)).astype("float32")
            self.step(to_tensor(x), to_tensor(i == 1))
        return self

    def names(self):
        return {id(p): n for n, p in self.model.named_parameters()}

    def arrays(self):
        return {n: p._array for n, p in self.model.named_parameters()} | self.optimizer.state_arrays(self.names())

    def kept(self):
        """Memory kinds of slots and masters, of everything else."""
        held = {n: a.sharding.memory_kind for n, a in self.optimizer.state_arrays(self.names()).items() if "/" in n}
        return set(held.values()), {p._array.sharding.memory_kind for p in self.model.parameters()}


def check_same_bits(a, b):
    assert list(a) == list(b)
    for name, array in a.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(b[name]), err_msg=name)


@pytest.mark.slow
@pytest.mark.slow_cases(
    "float32-one",
    "float32-one_by_a_plan",
    "float32-zero1",
    "float32-zero2_mp",
    "float32-zero3",
    "masters-one",
    "masters-one_by_a_plan",
    "masters-zero1",
    "masters-zero3",
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "masters"])
def test_the_same_bits_as_without(mesh, amp):
    plain = Run(MESHES[mesh], False, amp).steps()
    moved = Run(MESHES[mesh], True, amp)
    moved.optimizer.create_state()
    assert moved.kept() == ({"pinned_host"}, {"device"})
    moved.steps()
    assert moved.kept() == ({"pinned_host"}, {"device"})
    assert plain.kept() == ({"device"}, {"device"})
    check_same_bits(moved.arrays(), plain.arrays())
    if MESHES[mesh]:
        for name, array in moved.arrays().items():
            without = plain.arrays()[name].sharding
            assert array.sharding.shard_shape(array.shape) == without.shard_shape(array.shape), name
    assert moved.step.retraces == ["first call"]


@pytest.mark.slow
def test_eager_steps_and_no_compiling_after_the_first():
    moved = Run({}, True, captured=False).steps(range(2))
    with counted_compilations() as compiled:
        moved.steps(range(2, STEPS))
    assert not compiled
    assert moved.kept() == ({"pinned_host"}, {"device"})
    check_same_bits(moved.arrays(), Run({}, False, captured=False).steps().arrays())


def test_a_step_while_something_else_holds_the_state():
    moved = Run(MESHES["zero1"], True).steps(range(1))
    held = moved.arrays()
    before = {n: np.array(a) for n, a in held.items()}
    moved.steps(range(1, STEPS))
    check_same_bits(held, before)
    assert moved.kept() == ({"pinned_host"}, {"device"})
    assert moved.step.retraces == ["first call"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("saved", "restored"), [("zero1", "zero3"), ("zero3", "one")])
def test_a_checkpoint_continues_with_or_without_offload(saved, restored, tmp_path):
    first = Run(MESHES[saved], True).steps()
    store = CheckpointStore(tmp_path)
    store.save(STEPS, first.arrays(), {})
    store.wait()
    clear_plan()
    for offload in (False, True):
        second = Run(MESHES[restored], offload)
        second.optimizer.create_state()
        target = {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for n, a in second.arrays().items()}
        arrays, _ = store.restore(target, None)
        for name, p in second.model.named_parameters():
            state.write(p, arrays[name])
        second.optimizer.load_state_arrays(arrays, second.names())
        check_same_bits(second.arrays(), first.arrays())
        assert second.kept()[0] == {"pinned_host" if offload else "device"}
        second.steps(range(STEPS, STEPS + 1))
        assert second.kept()[0] == {"pinned_host" if offload else "device"}
        clear_plan()


def test_a_state_dict_stays_on_the_host():
    first = Run(MESHES["zero1"], True).steps()
    second = Run(MESHES["zero1"], True)
    table = {p.name: q.name for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True)}
    renamed = {}
    for key, value in first.optimizer.state_dict().items():
        name = next(n for n in table if key.startswith(n))
        renamed[key.replace(name, table[name])] = value
    second.optimizer.create_state()
    second.optimizer.set_state_dict(renamed)
    assert second.kept()[0] == {"pinned_host"}
    check_same_bits(second.optimizer.state_arrays(second.names()), first.optimizer.state_arrays(first.names()))


def test_devices_without_host_memory_are_refused(monkeypatch):
    monkeypatch.setattr(placement, "memories_of", lambda device: {"device"})
    with pytest.raises(
        PlacementError, match=r"offload \['state', 'act'\] to host, and cpu device 0 .*it has \['device'\]"
    ):
        apply_plan(Plan.from_degrees(dp=8, offload=["state", "act"], recompute="full"), Net())
    assert layout.active.layout is None


def test_offload_of_parameters_without_a_step_of_chunks_is_refused():
    with pytest.raises(PlacementError, match=r"offload \['param', 'state'\] needs a step.*PlannedStep"):
        apply_plan(Plan.from_degrees(dp=8, offload=("param", "state")), Net())
    assert layout.active.layout is None
