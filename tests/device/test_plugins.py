"""Devices of PJRT libraries: what is no plugin is refused by a process of its own, and what is one is named."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import polyreme as paddle
from polyreme import flags
from polyreme.core.engine import plugins
from polyreme.device import register
from polyreme.errors import ConfigError, DeviceError


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "libdevice.so"
    path.write_bytes(b"\x7fELF but no more")
    return path


def test_what_is_no_library_is_refused(library, tmp_path):
    with pytest.raises(DeviceError, match=r"dev: there is no file .*/absent\.so; give the path of the library"):
        register("dev", tmp_path / "absent.so")
    with pytest.raises(DeviceError, match=r"libdevice\.so is no PJRT plugin: OSError.*GetPjrtApi"):
        register("dev", library)
    assert "dev" not in plugins.registered()


@pytest.mark.parametrize("name", ["cpu", "gpu", "two words", "1st"])
def test_a_name_is_an_identifier_of_its_own(name, library):
    with pytest.raises(ConfigError, match=f"the name '{name}'"):
        register(name, library)


@pytest.mark.parametrize(
    ("printed", "code", "match"),
    [
        (
            [{"version": "0.54"}],
            -11,
            r"ended the process .* by signal 11 \(interface version 0\.54, jaxlib",
        ),
        ([], 3, "exit status 3 .*last words"),
        (
            [{"version": "0.1"}, {"stage": "client", "error": "XlaRuntimeError: too old"}],
            0,
            "failed when .*0.1.*too old",
        ),
    ],
)
def test_what_the_trial_met_is_told(printed, code, match, library, monkeypatch):
    stdout = "\n".join(json.dumps({"probe": 1, **line}) for line in printed)
    run = subprocess.CompletedProcess([], code, stdout, "first\nlast words\n")
    monkeypatch.setattr(plugins.subprocess, "run", lambda *_, **__: run)
    with pytest.raises(DeviceError, match=match):
        register("dev", library)


def test_a_library_that_waits_is_given_up(library, monkeypatch):
    def wait(command, **_):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(plugins.subprocess, "run", wait)
    with pytest.raises(DeviceError, match="did not answer within 120 s"):
        register("dev", library)


def test_devices_are_named_in_the_environment(monkeypatch):
    monkeypatch.setenv("POLYREME_DEVICES", "one=/a/b.so, two=/c.so")
    assert flags.devices() == {"one": "/a/b.so", "two": "/c.so"}
    monkeypatch.setenv("POLYREME_DEVICES", "one")
    with pytest.raises(ConfigError, match="'one' has no library"):
        flags.devices()


def test_packages_that_fail_are_left_out(library, monkeypatch, caplog):
    def broken():
        raise OSError("no licence")

    entries = [
        SimpleNamespace(name="a", value="a:plugin", load=lambda: broken),
        SimpleNamespace(name="b", value="b:PLUGIN", load=lambda: plugins.Plugin("dev", str(library))),
    ]
    monkeypatch.setattr(plugins.importlib.metadata, "entry_points", lambda group: entries)
    plugins.register_known()
    assert "device a of a:plugin is left out: OSError: no licence" in caplog.text
    assert "is no PJRT plugin" in caplog.text


REAL = """
import sys, numpy as np, fastatomstruct_xla_cpu as wheel
import polyreme as paddle
from polyreme.core.engine import backend
before = paddle.ones([2]) if sys.argv[1] == "late" else None
plugin = paddle.device.register(
    "other", wheel.library_path(), step_options={"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
)
again = paddle.device.register("other", wheel.library_path(), step_options=plugin.step_options)
assert again is plugin
assert paddle.device.get_device() == "cpu"
assert paddle.device.get_all_custom_device_type() == ["other"]
assert paddle.device.is_compiled_with_custom_device("other")
assert "other:0" in paddle.device.get_available_custom_device()
paddle.set_device("other:0")
assert paddle.device.get_device() == "other:0"
x = paddle.to_tensor(np.eye(3, dtype="float32") * 2, stop_gradient=False)
(x @ x).sum().backward()
assert x.place == x.grad.place == paddle.CustomPlace("other", 0), x.grad.place
np.testing.assert_array_equal(x.grad.numpy(), np.full((3, 3), 4))
captured = paddle.jit.to_static(lambda x: (x @ x).sum())
assert float(captured(x)) == 12
assert backend.step_options()["xla_cpu_scheduler_type"] == "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
moved = x.cpu()
assert moved.place == paddle.CPUPlace() and moved.tolist() == x.tolist()
try:
    paddle.set_device("other:99")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_library_gives_devices_of_its_own(when, tmp_path):
    """The wheel fastatomstruct-xla-cpu holds an unmodified XLA CPU library with the PJRT C interface."""
    pytest.importorskip("fastatomstruct_xla_cpu", reason="pip install fastatomstruct-xla-cpu==2026.6.23")
    script = tmp_path / "script.py"
    script.write_text(REAL)
    run = subprocess.run([sys.executable, script, when], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "DeviceError asked for other:99, but there are" in run.stdout
    assert paddle.device.get_all_custom_device_type() == []


MIXED = """
import numpy as np, fastatomstruct_xla_cpu as wheel
import jax
import polyreme as paddle
from polyreme.distributed.prove import prove
from polyreme.errors import PlacementError
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer import AdamW
paddle.device.register("other", wheel.library_path())
rows = np.random.default_rng(0).integers(0, 128, (2, 8, 17))

def proof(devices=None, **degrees):
    return prove(
        lambda: GPT(GPTConfig.nano(dropout=0.1)),
        Plan.from_degrees(num_microbatches=2, **degrees),
        [(each[:, :-1], each[:, 1:]) for each in rows],
        optimizer=lambda m: AdamW(1e-2, parameters=m.parameters(), grad_clip=ClipGradByGlobalNorm(0.5)),
        devices=devices,
    )

for degrees in (
    {"pp": 2, "chunk_items": [1, 3], "stage_devices": ["cpu", "other"]},
    {"pp": 2, "mp": 2, "dp": 2, "schedule": "ZBH1", "stage_devices": ["other", "cpu"]},
    {"pp": 2, "schedule": "ZBVPP", "stage_devices": ["other", "cpu"]},
):
    found = proof(**degrees)
    assert found.holds, str(found)
try:
    proof([jax.devices("cpu")[0], jax.devices("other")[0]], dp=2)
except PlacementError as error:
    print(error)
"""


@pytest.mark.process
@pytest.mark.slow
def test_stages_on_two_kinds_of_devices_equal_one_device(tmp_path):
    pytest.importorskip("fastatomstruct_xla_cpu", reason="pip install fastatomstruct-xla-cpu==2026.6.23")
    script = tmp_path / "script.py"
    script.write_text(MIXED)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "mesh dp2 has devices of cpu and other in one program; give each stage devices of one kind" in run.stdout


UPDATES = """
import fastatomstruct_xla_cpu as wheel
import jax
import polyreme as paddle
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.optimizer import SGD

paddle.device.register("other", wheel.library_path())
kinds, traced = [jax.devices("cpu")[0], jax.devices("other")[0]], []

class Traced(SGD):
    def rule(self, p, *rest):
        traced.append(jax.config.jax_default_device)
        return super().rule(p, *rest)

layers = [paddle.nn.Linear(3, 2).to(place) for place in (paddle.CPUPlace(), paddle.CustomPlace("other", 0))]
for layer in layers:
    layer(paddle.ones([4, 3]).to(layer.weight.place)).sum().backward()
update = StagedUpdate(Traced(0.1, parameters=[p for layer in layers for p in layer.parameters()]))
for (group, programs), kind in zip(update.compiled(update.squares()), kinds, strict=True):
    assert group.parameters[0]._array.devices() == {kind}
    for program in programs:
        assert {d for s in jax.tree.leaves(program.input_shardings) for d in s.device_set} == {kind}
assert traced == [kind for kind in kinds for _ in ("weight", "bias")], traced
"""


@pytest.mark.process
def test_updates_over_two_kinds_are_compiled_for_their_own(tmp_path):
    pytest.importorskip("fastatomstruct_xla_cpu", reason="pip install fastatomstruct-xla-cpu==2026.6.23")
    script = tmp_path / "script.py"
    script.write_text(UPDATES)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-2000:]
