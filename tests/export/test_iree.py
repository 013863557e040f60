"""Artefacts compiled by IREE: what is refused without it, and with it the same numbers."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from polyreme import jit, nn
from polyreme.cli.main import main
from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, NumericsError
from polyreme.export import iree, read
from polyreme.hapi.input_spec import InputSpec
from polyreme.recipes.inference import deploy
from tests.recipes.tiny_run import train


@pytest.fixture
def pretended(monkeypatch):
    """A compiler that writes the length of what it is given."""

    class CompilerToolError(Exception):
        pass

    class Compiler:
        def __init__(self):
            self.CompilerToolError = CompilerToolError
            self.said = ""

        def compile_str(self, text, **options):
            if self.said:
                raise CompilerToolError(self.said)
            return str(len(text)).encode()

    compiler = Compiler()
    monkeypatch.setattr(iree, "check_installed", lambda: None)
    monkeypatch.setattr(iree, "version", lambda: "9.9")
    monkeypatch.setitem(sys.modules, "iree.compiler", compiler)
    return compiler


def save(folder: Path, shape, platforms=("cpu",), **options) -> Path:
    jit.save(nn.Linear(4, 3), folder / "net", [InputSpec(shape, "float32", "x")], platforms=platforms, **options)
    return folder / "net"


def test_without_iree_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(iree, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"iree-base-compiler, iree-base-runtime\); run pip install polyreme\[iree\]"):
        iree.IreeModel(tmp_path / "net")
    (tmp_path / "run").mkdir()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "net"), "--to", "iree"]) == 2
    assert "polyreme[iree]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "match"),
    [(["--to", "tvm"], "--to tvm: give xla or iree"), (["--to", "iree", "--platform", "tpu"], "is for this processor")],
    ids=["to", "platform"],
)
def test_what_export_cannot_do_is_refused(words, match, tmp_path, capsys):
    assert main(["export", str(tmp_path), str(tmp_path / "net"), *words]) == 2
    assert match in capsys.readouterr().err


def test_what_iree_does_not_take_is_refused(tmp_path, pretended):
    with pytest.raises(ConfigError, match="one program for cpu, cuda, tpu, and IREE takes one for cpu alone"):
        iree.compile_artifact(read(save(tmp_path, [2, 4], ("cpu", "cuda", "tpu"))))
    with pytest.raises(ConfigError, match="input 'x' has open sizes"):
        iree.compile_artifact(read(save(tmp_path, [None, 4])))
    with pytest.raises(ConfigError, match="IREE takes artefacts of polyreme's own"):
        iree.compile_artifact(read(Path(__file__).parents[1] / "paddle_files" / "text"))
    pretended.said = "Error code: 1\n<stdin>:1:2: error: failed to legalize operation 'stablehlo.fft'\n more"
    with pytest.raises(
        ConfigError, match=r"net.stablehlo: IREE 9.9 does not compile it: failed to legalize operation 'stablehlo.fft'"
    ):
        iree.compile_artifact(read(save(tmp_path, [2, 4])))


def test_modules_are_of_the_programs_that_they_were_compiled_from(tmp_path, pretended):
    prefix = save(tmp_path, [2, 4])
    artifact = read(prefix)
    assert iree.compile_artifact(artifact) == [tmp_path / "net.0.vmfb"]
    index = json.loads((tmp_path / "net.iree.json").read_text())
    programs = iree._programs(artifact)
    assert index["modules"][0]["digest"] == programs[0].record.file.digest
    assert iree._modules(artifact, programs) == [(tmp_path / "net.0.vmfb").read_bytes()]
    other = read(save(tmp_path, [3, 4]))
    with pytest.raises(CheckpointError, match=r"no module of net\.stablehlo as it is now; compile it again"):
        iree._modules(other, iree._programs(other))
    (tmp_path / "net.iree.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not what IREE's modules are listed in"):
        iree._modules(artifact, programs)


def test_outputs_further_apart_than_rounding_explains_end_it():
    class Own:
        @staticmethod
        def run(arrays):
            return [to_tensor(np.float32([1, 4]))]

    tokens = np.zeros((1, 2), np.int64)
    near = np.float32([1, 4]) + np.float32(4e-6)
    assert "outputs 4.1e-06 apart, of at most 4" in deploy._compared(Own, lambda arrays: [near], tokens, 2e-6, 1)
    with pytest.raises(NumericsError, match=r"tokens\[1, 2\]: IREE's outputs lie .* from XLA's, whose largest is 4"):
        deploy._compared(Own, lambda arrays: [near], tokens, 1e-7, 1)


@pytest.mark.slow
def test_iree_gives_the_numbers_of_xla(tmp_path):
    pytest.importorskip("iree.compiler")
    prefix = tmp_path / "net"
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    specs = [InputSpec([2, 4], "float32", "x"), InputSpec([2, 3], "float32", "unused")]

    class Two(nn.Layer):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x, unused):
            return self.net(x)

    jit.save(Two(), prefix, specs, platforms=("cpu",), differentiable=False)
    iree.compile_artifact(read(prefix))
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    (got,) = iree.IreeModel(prefix)([x, np.ones((2, 3), np.float32)])
    # sums of 4, 8, 8 and 8 terms, of values below 8
    np.testing.assert_allclose(got, net(to_tensor(x)).numpy(), rtol=0, atol=28 * 8 * np.finfo(np.float32).eps)
    train(tmp_path / "run", "train.steps=1", "train.warmup_steps=0", "checkpoint.interval=0")
    clear_plan()
    lines = deploy.export_iree(tmp_path / "run", tmp_path / "deploy" / "kjv", [4, 16], 2, repeat=3)
    assert sum("rounding explains" in line for line in lines) == 2
