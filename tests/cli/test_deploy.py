"""polyreme export and polyreme infer on a tiny run: what they write and say, and how they refuse."""

import numpy as np
import pytest
import yaml

from polyreme import export, jit, nn
from polyreme.cli.main import main
from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.hapi.input_spec import InputSpec
from polyreme.recipes.weights.base import load_trained
from tests.recipes.tiny_run import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output folder of a run of one step."""
    output = tmp_path_factory.mktemp("deploy") / "run"
    plan = ["plan.dp=8", "plan.sharding=1", "plan.mp=1", "plan.sharding_stage=0"]
    train(output, "train.steps=1", "train.warmup_steps=0", "checkpoint.interval=0", *plan)
    clear_plan()
    return output


@pytest.fixture(scope="module")
def relu(tmp_path_factory):
    """A tiny artefact."""
    prefix = tmp_path_factory.mktemp("relu") / "relu"
    jit.save(nn.ReLU(), prefix, [InputSpec([None, 2], "float32", "x")])
    np.save(prefix.with_name("x.npy"), np.float32([[-1, 2]]))
    return prefix


def ids(length):
    return np.random.default_rng(0).integers(0, 512, (2, length))


@pytest.mark.slow
def test_a_trained_model_goes_to_files_and_gives_its_logits(run, tmp_path, capsys):
    prefix = tmp_path / "deploy" / "net"
    assert main(["export", str(run), str(prefix), "--length", "4", "--length", "16", "--platform", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "step 1 of" in said
    assert "net.0.stablehlo" in said
    np.save(tmp_path / "ids.npy", ids(16))
    words = ["infer", str(prefix), "--input", f"tokens={tmp_path / 'ids.npy'}", "--output", str(tmp_path / "out")]
    assert main([*words, "--repeat", "2"]) == 0
    said = capsys.readouterr().out
    assert "output_0  float32[2, 16, 512]" in said
    assert "median of 2 runs" in said
    model, _ = load_trained(run)
    model.eval()
    want = model(to_tensor(ids(16))).numpy()
    # attention over 16 keys, 32 hidden sizes and 128 of the feed-forward a layer, two layers, and the projection
    bound = (2 * (16 + 32 + 128) + 32) * np.finfo(np.float32).eps * np.abs(want).max()
    np.testing.assert_allclose(np.load(tmp_path / "out" / "output_0.npy"), want, rtol=0, atol=bound)


@pytest.mark.slow
def test_a_configuration_names_its_runs_folder(run, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"model": {"num_heads": 8}, "output": str(run)}))
    assert main(["export", str(config), str(tmp_path / "net")]) == 0
    assert main(["infer", str(tmp_path / "net.json"), "--describe"]) == 0
    said = capsys.readouterr().out
    assert "takes  tokens int64[batch, 16]" in said
    assert "platforms    cpu, cuda, tpu" in said
    assert "gradients    no" in said


def test_describe_reads_well(relu, capsys):
    assert main(["infer", str(relu), "--describe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"artefact     {relu}"
    assert "  takes  x float32[batch, 2]" in lines
    assert "  gives  output_0 float32[batch, 2]" in lines
    assert any(line.startswith("  relu.stablehlo ") for line in lines)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["export", "nowhere", "{tmp}/net"], 2, "nowhere: no such folder or file"),
        (["export", "{tmp}", "{tmp}/net"], 4, "no checkpoints/ in it"),
        (["export", "{run}", "{tmp}/net", "--length", "17"], 2, "--length 17: the model has positions for 1 to 16"),
        (["export", "{run}", "{tmp}/net", "--platform", "npu"], 2, "give some of cpu, cuda, tpu"),
        (["export", "{run}", "{tmp}"], 2, "a folder; give FOLDER/NAME"),
        (["infer", "{tmp}/net"], 4, "net.json: no such file"),
        (["infer", "{relu}"], 2, "no value for input x; add --input x=FILE.npy"),
        (["infer", "{relu}", "--input", "x"], 2, "--input x: give NAME=FILE.npy"),
        (["infer", "{relu}", "--input", "y={relu}.json"], 2, "there is no such input"),
        (["infer", "{relu}", "--input", "x=a.npy", "--input", "x=b.npy"], 2, "given twice"),
        (["infer", "{relu}", "--input", "x=none.npy"], 3, "--input x=none.npy: no such file"),
        (["infer", "{relu}", "--input", "x={relu}.json"], 3, "not a .npy file of numbers"),
        (["infer", "{relu}", "--input", "x={tmp}/wide.npy"], 3, "input 'x' has size 3 in dim 1, which takes 2"),
        (["infer", "{relu}", "--input", "x={tmp}/many.npz"], 3, "an archive of several arrays"),
        (["infer", "{relu}", "--describe", "--input", "x=a.npy"], 2, "--describe runs nothing"),
        (["infer", "{relu}", "--device", ":1", "--input", "x=a.npy"], 2, "--device :1: give cpu, gpu"),
        (["infer", "{relu}", "--device", "gpu", "--input", "x=a.npy"], 2, "no gpu is available"),
        (["infer", "{relu}", "--device", "abacus:0", "--input", "x=a.npy"], 2, "no abacus is available"),
    ],
)
def test_refuses_what_it_cannot_do(run, relu, tmp_path, capsys, words, code, message):
    np.save(tmp_path / "wide.npy", np.ones((1, 3), np.float32))
    np.savez(tmp_path / "many.npz", a=np.ones(1))
    places = {"{run}": str(run), "{relu}": str(relu), "{tmp}": str(tmp_path)}
    filled = []
    for word in words:
        for mark, path in places.items():
            word = word.replace(mark, path)
        filled.append(word)
    assert main(filled) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") <= 2  # the error and where to read more
    assert message in captured.err


def test_outputs_are_written_under_their_names(relu, tmp_path, capsys):
    words = ["infer", str(relu), "--input", f"x={relu.with_name('x.npy')}", "--output", str(tmp_path / "o")]
    assert main([*words, "--repeat", "0"]) == 0
    assert "median" not in capsys.readouterr().out
    assert np.load(tmp_path / "o" / "output_0.npy").tolist() == [[0, 2]]


def test_a_name_in_a_manifest_does_not_choose_the_folder(tmp_path, capsys):
    export.write(tmp_path / "m", lambda s, x: [x[0]], {}, [InputSpec([1], name="x")], ["../../.y"])
    np.save(tmp_path / "x.npy", np.float32([1]))
    words = ["infer", str(tmp_path / "m"), "--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "a" / "b")]
    assert main([*words, "--repeat", "0"]) == 0
    assert [p.name for p in tmp_path.rglob("*y.npy")] == ["_.._.y.npy"]
    assert (tmp_path / "a" / "b" / "_.._.y.npy").exists()
