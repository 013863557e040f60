"""Parameters on disk, brought chunk by chunk: the same bits as the same chunks in memory, in less of it."""

import contextlib
import gc
from dataclasses import replace

import jax
import numpy as np
import pytest

import polyreme.optimizer as opt
from polyreme.core import rng, state
from polyreme.distributed.checkpoint.store import CheckpointStore
from polyreme.distributed.pipeline.chunks import in_small_chunks
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.pipeline.streamed import StreamedPipeline
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.errors import CheckpointError, ConfigError, PlacementError, ShapeError
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.nn.lazy import LazyGuard
from polyreme.optimizer import on_disk
from polyreme.training import MixedPrecision, SpikePolicy, StepPolicy

CONFIG = GPTConfig(vocab_size=64, hidden_size=16, num_layers=3, num_heads=2, seq_len=8, dropout=0.1)
LAYER_BYTES = 12 * 16 * 16 * 4 + 13 * 16 * 4


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(on_disk, "BUCKET_BYTES", 3000)
    yield
    clear_plan()


def tokens(step):
    ids = np.random.default_rng(step).integers(0, 64, (4, 9))
    return ids[:, :-1], ids[:, 1:]


def make_optimizer(model, clip=None):
    return opt.AdamW(0.01, parameters=model.parameters(), grad_clip=clip and ClipGradByGlobalNorm(clip))


class Run:
    """A small GPT and its step; unless `param` is offloaded the same chunks run with all weights in memory."""

    def __init__(
        self,
        path=None,
        kinds=("param", "state"),
        tier="disk",
        level="O0",
        lazy=True,
        mesh=None,
        clip=None,
        layers=3,
        **more,
    ):
        clear_plan()
        rng.seed(3)
        policy = StepPolicy(MixedPrecision(level, "bfloat16"), non_finite="skip" if clip else "apply")
        offload = {"offload": dict.fromkeys(kinds, tier)} if path else {}
        if path and tier == "disk":
            offload["offload_path"] = str(path)
        plan = Plan.from_degrees(**(mesh or {}), **offload, **more)
        devices = jax.devices()[: plan.mesh.size]
        with LazyGuard() if lazy and "param" in plan.offload else contextlib.nullcontext():
            self.model = GPT(replace(CONFIG, num_layers=layers))
        self.planned = PlannedStep(self.model, plan, lambda model: make_optimizer(model, clip), policy, devices)
        self.step, self.optimizer = self.planned.step, self.planned.optimizer
        if "param" not in plan.offload and plan.mesh.pp == 1:
            chunks = in_small_chunks(self.model, plan).get_model_chunks()
            losses, output = [self.model.pipeline_loss], self.model.pipeline_output
            pipeline = StreamedPipeline(chunks, losses, self.planned.layout, output, self.model.parameters())
            self.step = PipelineStep(pipeline, policy, self.optimizer)
        self.results = []

    def steps(self, first, last):
        for i in range(first, last):
            result = self.step(self.planned.cut(*tokens(i)))
            self.results.append([None if v is None else float(v) for v in result[:2]])
        return self

    def arrays(self):
        names = {id(p): n for n, p in self.model.named_parameters()}
        parameters = {n: getattr(p._array, "saved", p._array) for n, p in self.model.named_parameters()}
        return parameters | self.optimizer.state_arrays(names, as_stored=True)

    def load(self, arrays):
        for name, p in self.model.named_parameters():
            state.write(p, arrays[name])
        names = {id(p): n for n, p in self.model.named_parameters()}
        self.optimizer.load_state_arrays(arrays, names)


def check_same_bits(a, b):
    assert set(a) == set(b)
    for name, array in a.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(b[name]), err_msg=name)


def values(run):
    return {n: np.array(a) for n, a in run.arrays().items()}


# clipped, an update in memory is one program, of the same bits only where it is optimized, as slow tests are
@pytest.mark.slow_cases("waiting", "bfloat16", "sharded")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"num_microbatches": 2}, id="one"),
        pytest.param({"clip": 0.5, "num_microbatches": 2, "offload_buffers": 1}, id="waiting"),
        pytest.param({"level": "O1", "recompute": "full"}, id="bfloat16"),
        pytest.param({"mesh": {"dp": 2, "sharding": 2, "mp": 2, "sharding_stage": 3}}, id="sharded"),
    ],
)
def test_the_same_bits_as_the_same_chunks_in_memory(how, tmp_path):
    away = Run(tmp_path / "away", **how).steps(0, 3)
    in_memory = {k: v for k, v in how.items() if k != "offload_buffers"}
    plain = Run(**in_memory) if "clip" in how else Run(tmp_path / "plain", ("state",), **in_memory)
    plain.steps(0, 3)
    assert away.results == plain.results
    check_same_bits(values(away), values(plain))
    assert all(isinstance(p._array, on_disk.StoredArray) for p in away.model.parameters())


@pytest.mark.slow_cases("sharded")
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"num_microbatches": 2}, id="one"),
        pytest.param({"dp": 2, "sharding": 2, "mp": 2, "sharding_stage": 3}, id="sharded"),
    ],
)
def test_host_memory_gives_the_same_bits_as_a_disk(mesh, tmp_path):
    host = Run(tmp_path, tier="host", clip=0.5, mesh=mesh)
    p = host.model.tokens.weight
    value = p.numpy()
    first_array = p._array.saved
    assert {a.sharding.memory_kind for a in host.arrays().values() if a.ndim > 1} == {"pinned_host"}
    np.testing.assert_array_equal((p * 2).numpy(), value * 2)
    with pytest.raises(ShapeError, match=r"in host memory has shape \[64, 16\], the new one \[2\]"):
        state.write(p, np.zeros(2, np.float32))
    host.steps(0, 3)
    assert p._array.saved is not first_array
    disk = Run(tmp_path, clip=0.5, mesh=mesh).steps(0, 3)
    assert host.results == disk.results
    check_same_bits(values(host), values(disk))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [
        pytest.param({}, ("param", "state", "act"), id="chunks"),
        pytest.param({"pp": 2, "num_microbatches": 2, "schedule": "1F1B"}, ("act",), id="pipeline"),
    ],
)
def test_what_waits_for_a_backward_lies_in_host_memory(mesh, kinds, tmp_path):
    here = {"kinds": tuple(kind for kind in kinds if kind != "act"), "tier": "host", "mesh": mesh, "recompute": "full"}
    plain = Run(tmp_path, **here).steps(0, 2)
    away = Run(tmp_path, **here | {"kinds": kinds})
    memories = set()

    def see(_stage, _task, run):
        memories.update(a.sharding.memory_kind for done in run.waiting.values() for a in jax.tree.leaves(done.saved))

    with away.step.pipeline.observed(see):
        away.steps(0, 2)
    assert memories == {"pinned_host"}
    assert away.results == plain.results
    check_same_bits(values(away), values(plain))


def weight_bytes(model):
    """Bytes of the arrays there are of the shape of a layer's parameter: weights and gradients."""
    shapes = {tuple(p.shape) for p in model.blocks[0].parameters()}
    return sum(a.nbytes for a in jax.live_arrays() if a.shape in shapes)


@pytest.mark.slow
def test_a_step_holds_the_weights_of_two_chunks_and_shares_their_programs(tmp_path):
    gc.collect()
    run = Run(tmp_path, layers=8)
    before, live_bytes = weight_bytes(run.model), []
    run.steps(0, 1)
    with run.step.pipeline.observed(lambda *_: live_bytes.append(weight_bytes(run.model) - before)):
        run.steps(1, 2)
    assert weight_bytes(run.model) - before < 2 * LAYER_BYTES  # what threads had in hand last
    # weights of a chunk and the one that comes, gradients of a chunk and the one that leaves, on a busy machine also
    # what a thread has not let go of yet; in memory it is 16
    assert 2 * LAYER_BYTES <= max(live_bytes) < 6 * LAYER_BYTES
    blocks = [
        call for _, name, call in run.step.pipeline.programs() if name in ("chunk 1, forward", "chunk 3, forward")
    ]
    assert len(blocks) == 2
    assert blocks[0] is blocks[1]


@pytest.mark.slow
def test_a_checkpoint_links_to_the_files_and_continues(tmp_path):
    run = Run(tmp_path / "ssd").steps(0, 1)
    with CheckpointStore(tmp_path / "saved") as store:
        store.save(1, run.arrays(), {})
        before = values(run)
        run.steps(1, 2)
        store.wait()
        store.verify(1)
        check_same_bits(store.restore(None, 1)[0], before)
        after = values(run)
        assert any((after[n] != before[n]).any() for n in after)
        again = Run(tmp_path / "ssd", lazy=False)
        again.load(store.restore(again.arrays(), 1)[0])
        check_same_bits(values(again), before)
        run.load(store.restore(run.arrays(), 1)[0])
        check_same_bits(values(run), before)


def test_a_parameter_in_a_file_is_read_and_written_as_any_other(tmp_path):
    run = Run(tmp_path)
    p = run.model.tokens.weight
    value = p.numpy()
    np.testing.assert_array_equal((p * 2).numpy(), value * 2)
    assert (p.shape, p.dtype, p.size) == ([64, 16], np.float32, 1024)
    p.set_value(value + 1)
    assert isinstance(p._array, on_disk.StoredArray)
    np.testing.assert_array_equal(p.numpy(), value + 1)
    with pytest.raises(CheckpointError, match=r"is float32\[64, 16\], the value float32\[2\]"):
        state.write(p, np.zeros(2, np.float32))
    assert np.isfinite(run.planned.outputs(tokens(0)[0])).all()
    run.model.eval()
    assert float(run.planned.evaluate(*tokens(0))) == float(run.planned.evaluate(*tokens(0)))


def test_an_error_of_the_disk_names_the_file(tmp_path, monkeypatch):
    run = Run(tmp_path)
    monkeypatch.setenv("FAULTS", "offload.part:raise=EIO@3")
    with pytest.raises(CheckpointError, match=r"data-00000-0000\d\.safetensors cannot be read"):
        run.steps(0, 1)


class Whole(Layer):
    """A model that is no sequence of chunks."""

    def __init__(self):
        super().__init__()
        self.up = Linear(2, 2)


def plan(path, **more):
    return Plan.from_degrees(offload={"param": "disk", "state": "disk"}, offload_path=str(path), **more)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ({"precision": MixedPrecision("O2", "bfloat16")}, "amp level O2.*use level O1"),
        ({"spikes": SpikePolicy("clip")}, "spikes='clip'.*use 'skip'"),
        ({"precision": MixedPrecision("O1", "float16", scaler={})}, "loss scaler.*use bfloat16"),
    ],
)
def test_what_does_not_work_is_refused_before_anything_is_written(policy, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        PlannedStep(GPT(CONFIG), plan(tmp_path / "ssd"), make_optimizer, StepPolicy(**policy), jax.devices()[:1])
    assert not (tmp_path / "ssd").exists()


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(on_disk, "free_bytes", lambda path: 60000)
    with pytest.raises(ConfigError, match=r"88192 bytes of parameters and gradients go .* 60000 are free; make room"):
        Run(tmp_path / "ssd")
    assert not (tmp_path / "ssd").exists()


def test_models_and_steps_without_chunks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"offload of param with a loss of its own: chunks end with the model's"):
        PlannedStep(GPT(CONFIG), plan(tmp_path / "ssd"), make_optimizer, StepPolicy(), loss=lambda m, x, y: m(x, y))
    with pytest.raises(ConfigError, match="needs a model in chunks; make Whole a PipelineLayer of one stage"):
        PlannedStep(Whole(), plan(tmp_path / "ssd"), make_optimizer, StepPolicy(), jax.devices()[:1])
    with pytest.raises(PlacementError, match=r"'param': 'disk', .* needs a step that brings the weights"):
        apply_plan(plan(tmp_path / "ssd"), Whole(), jax.devices()[:1])
    assert not (tmp_path / "ssd").exists()
