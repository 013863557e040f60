"""Optimizer state in files, updated bucket by bucket: the same bits as in memory, and checkpoints of it."""

import errno
import os

import jax
import numpy as np
import pytest

import polyreme.optimizer as opt
from polyreme.amp import GradScaler
from polyreme.core import rng
from polyreme.distributed.checkpoint.store import CheckpointStore
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, CheckpointError, ConfigError, NoSpaceError
from polyreme.io import bucket_files
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByValue
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import on_disk
from polyreme.training import MixedPrecision, StepPolicy


class Net(Layer):
    """A few parameters of unlike shapes, and a loss."""

    def __init__(self):
        super().__init__()
        self.up = Linear(8, 16, dims=("embed", "ffn"))
        self.down = Linear(16, 8, dims=("ffn", "embed"))
        self.gain = self.create_parameter([])

    def forward(self, x, labels):
        return (((self.down(self.up(x).tanh()) * self.gain) - labels) ** 2).mean().astype("float32")


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(on_disk, "BUCKET_BYTES", 300)
    yield
    clear_plan()


def data(step):
    x = np.random.default_rng(step).normal(size=(8, 8)).astype("float32")
    return x, x[:, ::-1].copy()


def disk(path, **more):
    return {"offload": {"state": "disk"}, "offload_path": str(path), **more}


class Run:
    """A model under a plan and its step, as training has it."""

    def __init__(self, mesh, level="O0", clip=0.1, **offload):
        rng.seed(3)
        clear_plan()
        plan = Plan.from_degrees(**mesh, **offload)
        self.model = Net()
        precision = MixedPrecision(level, "bfloat16", master_grad=True)
        self.step = PlannedStep(
            self.model,
            plan,
            lambda model: opt.AdamW(0.01, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(clip)),
            StepPolicy(precision, non_finite="skip"),
            jax.devices()[: plan.mesh.size],
        )
        self.optimizer = self.step.optimizer
        self.losses = []

    def steps(self, first, last):
        for i in range(first, last):
            x, labels = data(i)
            x[0, 0] = np.inf if i == 1 else x[0, 0]  # a step that changes nothing
            if self.optimizer.is_streamed:
                result = self.step(x, labels)
                self.losses.append((float(result.loss), bool(result.skipped)))
            else:  # the update as a program of its own: in one program XLA may round across the border
                whole = self.step.step
                loss, _ = whole.gradients(self.step.cut(x, labels))
                skipped = whole.step.judge(loss)["skipped"]
                whole.step.apply(skipped)
                self.losses.append((float(loss), bool(skipped)))
        return self

    def names(self):
        return {id(p): n for n, p in self.model.named_parameters()}

    def arrays(self, as_stored=False):
        parameters = {n: p._array for n, p in self.model.named_parameters()}
        return parameters | self.optimizer.state_arrays(self.names(), as_stored=as_stored)

    def target(self):
        return {
            n: a if isinstance(a, on_disk.StoredArray) else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for n, a in self.arrays(as_stored=True).items()
        }

    def load(self, arrays):
        for name, p in self.model.named_parameters():
            p._array = arrays[name]
        self.optimizer.load_state_arrays(arrays, self.names())


def check_same_bits(a, b):
    assert set(a) == set(b)
    for name, array in a.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(b[name]), err_msg=name)


# of float32 parameters only what is compiled with optimization, as slow tests are, has the same bits in other programs
@pytest.mark.slow_cases("one", "accumulated", "zero3")
@pytest.mark.parametrize(
    ("mesh", "level", "more"),
    [
        pytest.param({}, "O0", {"offload_buffers": 1}, id="one"),
        pytest.param({"num_microbatches": 2}, "O2", {}, id="accumulated"),
        pytest.param({"sharding": 2, "dp": 2, "sharding_stage": 2}, "O2", {"offload_ratio": 0.6}, id="zero2"),
        pytest.param({"sharding": 2, "mp": 2, "sharding_stage": 3}, "O0", {}, id="zero3"),
    ],
)
def test_the_same_bits_as_in_memory(mesh, level, more, tmp_path):
    plain = Run(mesh, level).steps(0, 3)
    away = Run(mesh, level, **disk(tmp_path, **more)).steps(0, 3)
    assert away.losses == plain.losses
    assert [skipped for *_, skipped in plain.losses] == [False, True, False]
    stored = [a for a in away.arrays(as_stored=True).values() if isinstance(a, on_disk.StoredArray)]
    arrays = 3 if level == "O2" else 2
    assert len(stored) == arrays * (4 if "offload_ratio" in more else 5)
    assert len(away.optimizer.files.buckets) > 1
    check_same_bits(away.arrays(), plain.arrays())


SHAPES = [(8, 4), (4,), (3, 5), ()]


class Bare:
    """Parameters with gradients of their own and an optimizer over them; nothing but the update is compiled."""

    def __init__(self, make, offload, dtype="float32"):
        clear_plan()
        rng = np.random.default_rng(1)
        self.model = Layer()
        for at, shape in enumerate(SHAPES):
            setattr(self.model, f"p{at}", Parameter(rng.normal(size=shape).astype(dtype)))
        apply_plan(Plan.from_degrees(**offload), self.model, jax.devices()[:1])
        self.optimizer = make(self.model.parameters())
        self.scaler = GradScaler(init_loss_scaling=4.0) if dtype == "float16" else None

    def step(self, seed, without=()):
        rng = np.random.default_rng(seed)
        for at, p in enumerate(self.model.parameters()):
            g = rng.normal(size=p.shape).astype(p.dtype)
            p.grad = None if at in without else to_tensor(g)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        return self

    def arrays(self, as_stored=False):
        names = {id(p): n for n, p in self.model.named_parameters()}
        found = {n: p._array for n, p in self.model.named_parameters()}
        return found | self.optimizer.state_arrays(names, as_stored=as_stored)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(lambda ps: opt.Lamb(0.01, parameters=ps), "float32", id="lamb"),
        pytest.param(lambda ps: opt.Momentum(0.1, parameters=ps, multi_precision=True), "float16", id="scaler"),
        pytest.param(
            lambda ps: opt.Adam(0.1, parameters=ps, amsgrad=True, grad_clip=ClipGradByValue(0.5)),
            "float32",
            id="amsgrad",
        ),
    ],
)
def test_eager_steps_of_other_optimizers(make, dtype, tmp_path):
    plain, away = Bare(make, {}, dtype), Bare(make, disk(tmp_path), dtype)
    for run in (plain, away):
        run.step(0).step(1, without=(2,)).step(2)  # a bucket of which one parameter has no gradient
    assert away.optimizer.files is not None
    check_same_bits(away.arrays(), plain.arrays())


def make_adam(parameters):
    return opt.Adam(0.1, parameters=parameters)


def test_a_checkpoint_links_to_the_files_and_continues_anywhere(tmp_path):
    mesh = {"sharding": 2, "sharding_stage": 1}
    away = Run(mesh, **disk(tmp_path / "ssd")).steps(0, 1)
    with CheckpointStore(tmp_path / "saved") as store:
        store.save(2, away.arrays(as_stored=True), {})
        before = {n: np.array(a) for n, a in away.arrays().items()}
        away.steps(2, 3)  # while it is being saved: the checkpoint's files are not written again
        store.wait()
        store.verify(2)
        linked = [f.name for f in store.manifest(2).files if f.name.endswith(".safetensors")]
        assert len(linked) == len(away.optimizer.files.buckets)
        assert os.stat(tmp_path / "saved" / "step_00000002" / linked[0]).st_nlink == 1  # until that step it was 2
        check_same_bits(store.restore(None, 2)[0], before)
        after = away.arrays()
        assert any((np.asarray(after[n]) != before[n]).any() for n in after)
        away.load(store.restore(away.target(), 2)[0])
        away.steps(2, 3)
        check_same_bits(away.arrays(), after)
        for again in (Run({}), Run({}, **disk(tmp_path / "ssd", offload_ratio=0.5))):
            again.load(store.restore(again.target(), 2)[0])
            check_same_bits(again.arrays(), before)


def test_files_of_another_disk_are_copied(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(18, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    away = Bare(make_adam, disk(tmp_path / "ssd")).step(0)
    with CheckpointStore(tmp_path / "saved") as store:
        before = {n: np.array(a) for n, a in away.arrays().items()}
        store.save(0, away.arrays(as_stored=True), {})
        for name, tensor in away.optimizer.state_dict().items():  # reads and writes the files
            if name.endswith("moment1_0"):
                tensor.set_value(tensor.numpy() + 1)
        store.wait()
        store.verify(0)
        check_same_bits(store.restore(None, 0)[0], before)
        np.testing.assert_array_equal(np.asarray(away.arrays()["moment1/p0"]), before["moment1/p0"] + 1)


@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        ("write:raise=ENOSPC@2", NoSpaceError, r"cannot be written \(.* bytes, \d+ are free"),
        ("read:raise=EIO@2", CheckpointError, r"cannot be read \("),
    ],
)
def test_an_error_of_a_thread_names_the_file(fault, error, match, tmp_path, monkeypatch):
    away = Bare(make_adam, disk(tmp_path, offload_buffers=2))
    away.optimizer.create_state()
    monkeypatch.setenv("FAULTS", f"offload.{fault}")
    with pytest.raises(error, match=rf"data-00000-0000\d\.safetensors {match}"):
        away.step(0)
    monkeypatch.delenv("FAULTS")
    with pytest.raises(CheckpointError, match=r"failed half way .*go on from the last checkpoint"):
        away.step(0)


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"offload_path: .*file cannot be written \(.*name a folder that can"):
        Bare(make_adam, disk(tmp_path / "file")).optimizer.create_state()
    monkeypatch.setattr(on_disk, "free_bytes", lambda path: 300)
    with pytest.raises(
        ConfigError, match=r"\d+ bytes of optimizer state go .* 300 are free; lower offload_ratio to 0\.\d"
    ):
        Bare(make_adam, disk(tmp_path / "ssd")).optimizer.create_state()
    assert os.listdir(tmp_path) == ["file"]
    policy = StepPolicy(MixedPrecision("O0", "bfloat16"))
    for words in (disk(tmp_path / "ssd"), {"offload": ["state"]}):
        plan = Plan.from_degrees(**words)
        with pytest.raises(ConfigError, match="SGD keeps no arrays for each parameter"):
            PlannedStep(Net(), plan, lambda m: opt.SGD(0.1, m.parameters()), policy, jax.devices()[:1])


def test_a_captured_step_says_where_to_call_it(tmp_path):
    model = Net()
    apply_plan(Plan.from_degrees(**disk(tmp_path)), model, jax.devices()[:1])
    optimizer = opt.Adam(0.1, parameters=model.parameters())
    optimizer.create_state()

    @to_static
    def step(x, labels):
        model(x, labels).backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"Adam.step\(\) in a captured function: its state lies on disk"):
        step(*map(to_tensor, data(0)))


def test_folders_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path):
    (tmp_path / "state-1-0").mkdir()
    (tmp_path / "state-1-0" / "data-00000-00000.safetensors").write_text("left")
    first, second = (Bare(make_adam, disk(tmp_path)) for _ in range(2))
    for run in (first, second):
        run.optimizer.create_state()
    assert sorted(os.listdir(tmp_path)) == [f"state-{os.getpid()}-0", f"state-{os.getpid()}-1"]
    del first, second


def test_a_disk_too_full_for_the_trial_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(ConfigError, match=r"has no room for a trial of 4194304 bytes, \d+ are free; make room"):
        bucket_files.measure(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_disk_without_direct_io_is_measured_through_the_cache(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "no direct I/O")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    speed = bucket_files.measure(tmp_path)
    assert speed.write > 0
    assert speed.read > 0
    assert not speed.direct
    assert not os.listdir(tmp_path)
