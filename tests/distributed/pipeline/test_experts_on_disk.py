"""Experts in files, of which those that tokens chose are brought: the bits of a step that brings them all."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

import polyreme as paddle
import polyreme.optimizer as opt
from polyreme.core import rng, state
from polyreme.distributed.checkpoint.store import CheckpointStore
from polyreme.distributed.pipeline import streamed
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.distributed.prove import prove
from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.experts.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.nn.clip import ClipGradByGlobalNorm, ClipGradByNorm
from polyreme.nn.lazy import LazyGuard
from polyreme.optimizer import late_updates, on_disk
from polyreme.training import StepPolicy
from tests.distributed.pipeline import experts_run

CONFIG = MixtralConfig.nano(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, seq_len=8, num_experts=8, experts_per_token=1,
    expert_ffn_size=16, routing="hash",
)  # fmt: skip
# a hash router sends a token wherever its id says: batches of few ids reach few experts
VOCABULARIES = [4, 4, 64, 2, 3, 64]


@pytest.fixture(autouse=True)
def _no_plan():
    yield
    clear_plan()


def tokens(step):
    ids = np.random.default_rng(step).integers(0, VOCABULARIES[step], (4, 9))
    return ids[:, :-1], ids[:, 1:]


class Run:
    """A small Mixtral and its step, with its experts brought one by one or all. kinds: what goes to disk, or a mapping
    of it to where it goes."""

    def __init__(self, path, kinds=("param", "state", "expert"), clip=1.0, optimizer=None, config=CONFIG, **more):
        clear_plan()
        rng.seed(3)
        offload = kinds if isinstance(kinds, dict) else dict.fromkeys(kinds, "disk")
        where = {"offload_path": str(path)} if "disk" in offload.values() else {}
        plan = Plan.from_degrees(offload=offload, **where, **more)
        self.rate = opt.lr.StepDecay(0.01, 2, 0.5)

        def adamw(model):
            return opt.AdamW(self.rate, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(clip))

        with LazyGuard():
            self.model = Mixtral(config)
        policy = StepPolicy(non_finite="skip")
        self.step = PlannedStep(self.model, plan, optimizer or adamw, policy, jax.devices()[: plan.mesh.size])
        self.optimizer, self.results = self.step.optimizer, []

    def steps(self, first, last):
        for i in range(first, last):
            result = self.step(*tokens(i))
            self.results.append([float(value) for value in result[:2]])
            self.rate.step()
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

    def values(self):
        return {n: np.array(a) for n, a in self.arrays().items()}


def check_same_bits(a, b):
    assert set(a) == set(b)
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


@contextlib.contextmanager
def watching(p):
    """Inside the block, (experts of a parameter that are read, experts that are written)."""
    file, entries = p._array.file, {at: start[0] for start, at in p._array.places.items()}
    read_part, write_part = file.read_part, file.write_part
    read, written = set(), set()

    def reading(at, out=None):
        read.add(entries.get(at, -1))
        return read_part(at, out)

    def writing(at, array):
        written.add(entries.get(at, -1))
        write_part(at, array)

    file.read_part, file.write_part = reading, writing
    yield read, written
    del file.read_part, file.write_part


def chosen(run, block, step):
    """The experts that the ids of a step's batch go to."""
    choices = run.model.blocks[block].ffn.router(paddle.to_tensor(tokens(step)[0])).choices
    return set(choices.numpy().reshape(-1).tolist())


def test_the_same_bits_as_when_all_experts_move(tmp_path, monkeypatch):
    monkeypatch.setattr(late_updates, "MOST_LATE", 3)
    by_expert = Run(tmp_path / "expert", num_microbatches=2).steps(0, 5)
    whole = Run(tmp_path / "whole", ("param", "state"), num_microbatches=2).steps(0, 5)
    assert by_expert.results == whole.results
    monkeypatch.setattr(late_updates, "MOST_LATE", 64)
    # what nothing chose was not moved, and is told of as if it had been
    up = by_expert.model.blocks[1].ffn.up
    for step in (3, 4):
        with watching(up) as (read, written):
            by_expert.steps(step, step + 1)
        wanted = chosen(by_expert, 1, step)
        assert (read - {-1}, written - {-1}) == (wanted, wanted)
        assert 0 < len(wanted) < up.shape[0]
        whole.steps(step, step + 1)
    assert by_expert.results == whole.results
    with watching(up) as (read, written):
        check_same_bits(by_expert.values(), whole.values())
    assert written - {-1}  # those that had missed updates


@pytest.mark.slow_cases("disk and host", "sharded")
@pytest.mark.parametrize(
    ("kinds", "mesh"),
    [
        pytest.param({"expert": "host"}, {"ep": 2, "sharding": 2, "sharding_stage": 3}, id="host"),
        pytest.param({"expert": "disk", "param": "host", "state": "host"}, {"ep": 2}, id="disk and host"),
        pytest.param({"expert": "disk"}, {"ep": 2, "dp": 2, "mp": 2, "expert_axes": ("ep", "mp")}, id="sharded"),
    ],
)
def test_over_devices_experts_without_tokens_do_not_drift(kinds, mesh, tmp_path, monkeypatch):
    """Against the same programs with every expert brought and updated in every step."""
    chosen_ones = Run(tmp_path / "chosen", kinds, num_microbatches=2, **mesh).steps(0, 4)
    up = chosen_ones.model.blocks[1].ffn.up
    with watching(up) as (read, written):
        chosen_ones.steps(4, 5)
    wanted = chosen(chosen_ones, 1, 4)
    assert (read - {-1}, written - {-1}) == (wanted, wanted)
    assert 0 < len(wanted) < up.shape[0]
    bring = streamed.ChosenExperts.bring
    monkeypatch.setattr(streamed.ChosenExperts, "bring", lambda self, choices: bring(self, np.arange(8)))
    every_one = Run(tmp_path / "every", kinds, num_microbatches=2, **mesh).steps(0, 5)
    assert chosen_ones.results == every_one.results
    check_same_bits(chosen_ones.values(), every_one.values())


def test_a_checkpoint_of_experts_over_devices_goes_anywhere(tmp_path):
    run = Run(tmp_path / "run", {"expert": "host"}, ep=2, sharding=2, sharding_stage=3, num_microbatches=2).steps(0, 2)
    with CheckpointStore(tmp_path / "kept") as store:
        store.save(2, run.arrays(), {})
        want = run.values()
        run.steps(2, 3)  # while the store copies what was there
        store.wait()
        store.verify(2)
        again = Run(tmp_path / "again", ("expert",))
        again.load(store.restore(again.arrays(), 2)[0])
        check_same_bits(again.values(), want)


@pytest.mark.slow
def test_a_checkpoint_holds_what_experts_missed_and_a_run_goes_on_from_it(tmp_path):
    run = Run(tmp_path / "run").steps(0, 4)
    with CheckpointStore(tmp_path / "kept") as store:
        store.save(4, run.arrays(), {})
        run.steps(4, 6)
        want = run.values()
        again = Run(tmp_path / "again")
        for _ in range(4):
            again.rate.step()
        arrays, _ = store.restore(again.arrays(), 4)
        again.load(arrays)
    again.steps(4, 6)
    assert again.results == run.results[4:]
    check_same_bits(again.values(), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "ep"),
    [
        pytest.param("offload.fill:kill@200", 1, id="update"),
        pytest.param("offload.part:kill@270", 1, id="read"),
        pytest.param("offload.fill:kill@200", 2, id="two devices"),
    ],
)
def test_killed_in_a_step_it_goes_on_to_the_same_bits(fault, ep, tmp_path):
    """A fault of the table ends the process by SIGKILL: in the third or fourth step, after the only checkpoint."""
    command = [sys.executable, "-m", "tests.distributed.pipeline.experts_run"]
    command += [str(tmp_path / "killed"), str(ep)]
    killed = subprocess.run(command, env=os.environ | {"FAULTS": fault}, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with CheckpointStore(tmp_path / "killed" / "saved", read_only=True) as store:
        assert store.steps() == [2]
    results = []
    for name in ("killed", "whole"):
        experts_run.train(tmp_path / name, ep)
        with CheckpointStore(tmp_path / name / "saved", read_only=True) as store:
            results.append(store.restore(None, experts_run.STEPS))
    assert results[0][1] == results[1][1]
    check_same_bits(results[0][0], results[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_learned_routers_and_experts_alone_on_disk(family, tmp_path):
    """Other parameters stay in memory, in both runs."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "seq_len": 8}
    results = []
    for kinds in (("param", "state", "expert"), ("param", "state"), ("expert",)):
        clear_plan()
        rng.seed(3)
        plan = Plan.from_degrees(
            offload=dict.fromkeys(kinds, "disk"), offload_path=str(tmp_path / "-".join(kinds)), num_microbatches=2,
            recompute="full",
        )  # fmt: skip
        with LazyGuard():
            if family == "mixtral":
                model = Mixtral(MixtralConfig.nano(**sizes, num_experts=8, experts_per_token=2))
            else:
                model = DeepseekV3(DeepseekV3Config.nano(**sizes, num_nextn_predict_layers=1))
        step = PlannedStep(
            model, plan, lambda m: opt.AdamW(0.01, parameters=m.parameters()), StepPolicy(), jax.devices()[:1]
        )
        results.append([float(step(*tokens(i)).loss) for i in range(6)])
    assert results[0] == results[1]
    # the update of what is in memory is one program, and may round otherwise
    np.testing.assert_allclose(results[2], results[1], rtol=1e-5)


@pytest.mark.slow
def test_a_step_that_is_left_out_is_missed_by_nobody(tmp_path):
    # blocks with routers that learn are alike, and share their programs
    config = replace(CONFIG, routing="token_choice")
    runs = [Run(tmp_path / "a", config=config), Run(tmp_path / "b", ("param", "state"), config=config)]
    for run in runs:
        run.steps(0, 2)
        weight = run.model.norm.weight
        before = weight.numpy()
        weight.set_value(before * np.nan)  # a loss that is none
        run.steps(2, 3)
        weight.set_value(before)
        run.steps(3, 4)
    up, pipeline = runs[0].model.blocks[1].ffn.up, runs[0].step.step.pipeline
    with watching(up) as (read, _):
        runs[0].steps(4, 5)
    wanted = pipeline.gradients.files.tensor(up, "grad").stored.holds
    assert read - {-1} == wanted
    assert 0 < len(wanted) < up.shape[0]
    runs[1].steps(4, 5)
    check_same_bits(runs[0].values(), runs[1].values())


@pytest.mark.slow
def test_it_is_proved_equal_to_one_device(tmp_path):
    plan = Plan.from_degrees(offload={"expert": "disk"}, offload_path=str(tmp_path), num_microbatches=2)
    config = replace(CONFIG, routing="token_choice", experts_per_token=2)
    proof = prove(
        lambda: Mixtral(config), plan, [tokens(i) for i in range(3)], devices=jax.devices()[:1],
        optimizer=lambda model: opt.AdamW(0.01, parameters=model.parameters()),
    )  # fmt: skip
    assert proof.holds, str(proof)


@pytest.mark.slow
def test_a_parameter_is_read_and_written_as_any_other(tmp_path):
    run = Run(tmp_path).steps(0, 2)
    down = run.model.blocks[0].ffn.down
    value = down.numpy()
    assert np.isfinite(value).all()
    down.set_value(value * 2)
    np.testing.assert_array_equal(down.numpy(), value * 2)
    assert np.isfinite(float(run.step.evaluate(*tokens(3))))
    # a copy, whose parameters have other names, lies in memory
    copied, moments = copy.deepcopy(run.optimizer).state_dict(), run.optimizer.state_dict()
    for own, theirs in zip(list(copied.values())[:-1], list(moments.values())[:-1], strict=True):
        np.testing.assert_array_equal(own.numpy(), theirs.numpy())


def test_what_cannot_be_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"offload 'expert' in plan on mesh .*stages of a pipeline .* set pp to 1"):
        Plan.from_degrees(pp=2, schedule="1F1B", num_microbatches=2, offload={"expert": "disk"}, offload_path="x")
    with pytest.raises(ConfigError, match="experts, the most of a model, in the host's memory, and others on disk"):
        Plan.from_degrees(offload={"expert": "host", "state": "disk"}, offload_path="x")
    with pytest.raises(ConfigError, match="needs a folder of the disk, offload_path is None"):
        Plan.from_degrees(offload={"expert": "disk"})
    with pytest.raises(ConfigError, match="with Lamb, which takes the norm of a whole parameter"):
        Run(tmp_path, optimizer=lambda model: opt.Lamb(0.01, parameters=model.parameters()))
    clip = ClipGradByNorm(1.0)
    with pytest.raises(ConfigError, match="with ClipGradByNorm, which takes the norm"):
        Run(tmp_path, optimizer=lambda model: opt.AdamW(0.01, parameters=model.parameters(), grad_clip=clip))
    plan = Plan.from_degrees(offload={"expert": "disk"}, offload_path=str(tmp_path))
    one = jax.devices()[:1]
    gpt = GPT(GPTConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, seq_len=8))
    layers = PipelineLayer([paddle.nn.Linear(2, 2)], num_stages=1, loss_fn=paddle.nn.functional.mse_loss)
    with pytest.raises(ConfigError, match=r"needs a model in chunks that end at routers.*PipelineLayer has none"):
        PlannedStep(layers, plan, lambda model: opt.AdamW(0.01, parameters=model.parameters()), StepPolicy(), one)
    with pytest.raises(PlacementError, match="the model has no parameters of experts"):
        PlannedStep(gpt, plan, lambda model: opt.AdamW(0.01, parameters=model.parameters()), StepPolicy(), one)
    monkeypatch.setattr(on_disk, "available_bytes", lambda: 20000)
    with pytest.raises(ConfigError, match=r"98304 bytes of parameters .* host's memory, 20000 are available; set"):
        Run(tmp_path, {"expert": "host"}, ep=2)
