"""`polyreme plan CONFIG` and `polyreme calibrate`: tables, JSON, the file for pretrain, pictures, and refusals."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from polyreme.cli.main import main
from polyreme.cli.plan import plan as plan_command
from polyreme.planner import calibration
from polyreme.recipes import config_file
from polyreme.recipes.finetune_config import FinetuneConfig
from polyreme.recipes.planning import calibrate
from polyreme.recipes.planning import verify as plan_verify
from polyreme.recipes.planning.plan import FEATURES
from polyreme.recipes.planning.tuning import tuning_graph

ROOT = Path(__file__).parents[2]
SMALL = """
model: {family: gpt, vocab_size: 512, hidden_size: 64, num_layers: 4, num_heads: 4, seq_len: 64}
data: {text: words.txt}
train: {global_batch: 16, accumulation: 2}
plan: {dp: 4, mp: 2}
"""
FAST = ("--without", "pp", "--without", "sep")


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    (tmp_path / "words.txt").write_text("in the beginning")
    return path


def test_the_best_plans_and_a_file_that_pretrain_takes(small, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    out, picture = tmp_path / "elsewhere" / "plan.yaml", tmp_path / "plan.png"
    assert main(["plan", str(small), "--devices", "8", "--output", str(out), "--explain", str(picture), *FAST]) == 0
    shown = capsys.readouterr().out
    assert "1*" in shown
    assert "Memory of a device of the plan marked *" in shown
    assert "dp4 mp2 x2" in shown  # the file's own plan, beside
    assert picture.stat().st_size > 10_000
    written = config_file.load(out).config
    assert written.plan.num_devices == 8
    assert written.device == "cpu"
    assert written.data.text == [str(tmp_path / "words.txt")]  # found from the new folder too
    assert written.model == config_file.load(small).config.model
    assert "ffn_size: 256" in out.read_text()
    assert "msa_width" not in out.read_text()  # of another family
    assert main(["pretrain", str(out), "--dry-run"]) == 0
    assert "(8 devices)" in capsys.readouterr().out


def test_json_has_everything(small, capsys):
    # 30 rows do not go with the file's own plan and accumulation, which are only compared
    words = ["plan", str(small), "--topology", "h100:2x8", "--global-batch", "32", "--top", "3", "--json", *FAST]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cluster"]["num_devices"] == 16
    assert answer["global_batch"] == 32
    assert answer["chosen"] == 0
    best = answer["plans"][0]
    assert best["memory"]["total"] == pytest.approx(sum(best["memory"][part] for part in best["memory"]) / 2)
    assert best["times"]["total"] == pytest.approx(best["step_seconds"])
    assert best["less_sure_by"] == ["unmeasured software"]  # dense, 16 bits, few devices of a kind with curves
    assert len({each["words"] for each in answer["plans"]}) == 3
    assert answer["own"] is None  # of 8 devices
    assert all(set(each) == {"why", "meshes"} for each in answer["ruled_out"])


def test_a_fine_tuning_run_is_planned_with_what_it_trains(tmp_path, capsys):
    """Weights of 4 bits lie where those of 16 do not; the plan comes back as a configuration of fine-tuning."""
    dims = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1024}
    base = {"model_type": "llama", "intermediate_size": 1024, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(dims | base), encoding="utf-8")
    (tmp_path / "chats.jsonl").write_text('{"messages": []}', encoding="utf-8")
    train = {"global_batch": 8, "amp_level": "O2"}
    config = {"model": str(tmp_path / "base"), "stage": "sft", "max_seq_len": 128, "train": train}
    file = tmp_path / "tune.yaml"
    file.write_text(json.dumps(config | {"data": {"train": str(tmp_path / "chats.jsonl")}}), encoding="utf-8")
    words, written = ["plan", str(file), "--topology", "h100:2", "--top", "2", *FAST], tmp_path / "tuned.yaml"
    assert main([*words, "--output", str(written)]) == 0
    told = capsys.readouterr().out
    assert "sft of LoRA of rank 8" in told
    assert f"polyreme finetune {written}" in told.replace("\n", "")
    assert config_file.load(written, (), FinetuneConfig).config.plan.num_devices == 2
    heads = [
        tuning_graph(config_file.load(file, [f"stage={n}"], FinetuneConfig).config).blocks[-1] for n in ("dpo", "rm")
    ]
    read = [op.inputs[0].shape[-1] for head in heads for op in head.operations if op.kind == "loss"]
    assert read == [1024, 1]  # a reward model gives a score of each row, and no logits
    bytes_held = []
    for codes in ([], ["weight_quantize_algo=nf4"]):
        assert main([*words, *codes, "--json", "--without", "sharding"]) == 0
        best = json.loads(capsys.readouterr().out)["plans"][0]
        assert "adapters" in best["less_sure_by"]
        bytes_held.append(best["memory"]["parameters"])
    assert bytes_held[1] < 0.6 * bytes_held[0]


def test_float32_on_devices_that_are_faster_in_16_bits_is_told(small, capsys):
    words = ["plan", str(small), "--topology", "b200:8", "--top", "1", *FAST]
    for level, is_told in (("O0", True), ("O1", False)):
        assert main([*words, f"train.amp_level={level}"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert ("plan with train.amp_level=O1" in told) is is_told
        assert "less sure than others by: borrowed curves, unmeasured software" in told


def test_where_no_mesh_divides_the_nearest_numbers_of_devices_are_told(small, capsys):
    assert main(["plan", str(small), "--topology", "h100:11x1", "--global-batch", "16"]) == 2
    shown = capsys.readouterr()
    assert "No mesh divides the model and the batch." in shown.out
    assert "none divides the model and the batch; 10 and 12 devices do" in shown.err
    assert main(["plan", str(small), "--topology", "h100:4x2", "--top", "1", *FAST]) == 0
    assert "8 x H100-SXM5-80GB, joined by NVLink in groups of 2" in capsys.readouterr().out.replace("\n", " ")


def test_a_plan_that_the_compiler_refutes_is_not_chosen(small, capsys, monkeypatch):
    stage = SimpleNamespace(total=1, exchanges=(plan_verify.Exchange("all-reduce", ("dp",), 3, 2048.0),))
    sizes = iter([1e15, 1.0, 2.0])

    def compiled(config, plan, *, topology):
        assert topology == ""
        total = next(sizes)
        return SimpleNamespace(total=total, stages=(stage,), to_dict=lambda: {"platform": "cpu"})

    monkeypatch.setattr(plan_verify, "verify_apart", compiled)
    assert main(["plan", str(small), "--devices", "8", "--verify", *FAST]) == 0
    shown = capsys.readouterr().out
    assert "1refuted" in shown
    assert "2*" in shown
    assert "3 all-reduce over dp: 2.0 KiB" in shown
    monkeypatch.setattr(plan_verify, "verify_apart", lambda *a, **k: SimpleNamespace(total=1e15, stages=(stage,)))
    assert main(["plan", str(small), "--devices", "8", "--verify", "--top", "2", *FAST]) == 2
    assert "the compiler refuted all 2" in capsys.readouterr().err


def test_when_nothing_fits_changes_are_named(small, tmp_path, capsys):
    cluster = tmp_path / "tiny.yaml"
    cluster.write_text("device: a100-40g\ndevices_per_node: 2\nmemory: 4.0e5\n")
    words = ["plan", str(small), "--cluster", str(cluster), "train.global_batch=8", "model.num_layers=2"]
    assert main([*words, *FAST, "--explain", str(tmp_path / "no.svg")]) == 2
    shown = capsys.readouterr()
    assert "No plan fits" in shown.out
    assert "The cheapest changes" in shown.out
    assert "no plan fits 2 x A100-SXM4-40GB; the cheapest change: " in shown.err
    assert "nothing fits; trying: allow pp" in shown.err
    assert (tmp_path / "no.svg").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "say what to plan for: --devices N, --topology v5e:16x16 or --cluster FILE; got none of them"),
        (["--devices", "8", "--topology", "v5e:2x2"], "got --devices and --topology"),
        (["--topology", "v5:8"], "unknown device kind 'v5'"),
        (["--devices", "8", "--without", "recomputes"], "did you mean 'recompute'"),
        (["--devices", "8", "--explain", "x.gif"], "a picture ends in .png"),
        (["--devices", "8", "--explain", "nowhere/x.png"], "there is no folder nowhere"),
        (["--devices", "8", "--output", "nowhere/x.yaml"], "there is no folder nowhere"),
        (["--devices", "8", "--output", "."], "is a folder"),
        (["--devices", "8", "--predict", "rows.csv"], "leave CONFIG out"),
        (["--devices", "8", "--global-batch", "7"], "7"),
        (
            ["--devices", "8", "--global-batch", "8", "train.global_batch=16"],
            "both set the rows of a step; leave one out",
        ),
        (["--device", "8"], "did you mean --devices"),
        (["--cluster", "nowhere.yaml"], "no such cluster file"),
    ],
)
def test_refusals_are_one_line(small, capsys, words, problem):
    assert main(["plan", str(small), *words]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "Traceback" not in error


def test_help_names_every_feature_that_may_be_left_out():
    (option,) = get_type_hints(plan_command, include_extras=True)["without"].__metadata__
    assert all(f" {name}," in option.help or f" {name};" in option.help for name in FEATURES)


def test_output_replaces_no_device_and_no_picture(small, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    picture = str(tmp_path / "x.png")
    for words, problem in (
        (["--output", str(tmp_path / "pipe")], "is no regular file, and would be replaced by one"),
        (["--output", picture, "--explain", picture], "is the picture of --explain; give another name"),
    ):
        assert main(["plan", str(small), "--devices", "8", *words]) == 2
        assert problem in capsys.readouterr().err
    assert main(["calibrate", "--output", str(tmp_path / "pipe")]) == 2
    assert "is no regular file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_that_cannot_be_written_to_is_told(small, tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    words = ["plan", str(small), "--devices", "8", "--output", str(tmp_path / "out.yaml"), *FAST]
    with monkeypatch.context() as inner:
        inner.setattr(os, "replace", refuse)
        assert main(words) == 2
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda _path, mode: mode != os.W_OK)
    assert main(words) == 2
    assert "cannot be written to; give another" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--output", "a"], ["--explain", "a.png"], ["--verify"], ["--without", "pp"]])
def test_rows_go_with_no_option_that_they_would_not_heed(capsys, words):
    assert main(["plan", "--predict", "rows.csv", *words]) == 2
    assert f"leave {words[0]} out" in capsys.readouterr().err
    assert main(["plan", "--predict", "rows.csv", "--global-batch", "8"]) == 2
    assert "leave --global-batch out" in capsys.readouterr().err


def test_output_never_overwrites_the_configuration(small, capsys):
    assert main(["plan", str(small), "--devices", "8", "--output", str(small)]) == 2
    assert "is the configuration itself" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "needs a CONFIG" in capsys.readouterr().err


def test_shipped_configurations_are_planned_without_jax():
    code = (
        "import sys; from polyreme.cli.main import main; "
        "words = ['configs/llama2_7b.yaml', '--topology', 'h100:8', '--global-batch', '64', '--without', 'pp']; "
        "code = main(['plan', *words]); assert 'jax' not in sys.modules; sys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert "6,738,415,616 parameters" in run.stdout
    gpt3 = config_file.load(ROOT / "configs" / "gpt3_175b.yaml").config
    assert gpt3.model.hidden_size == 12288


def test_calibrate_writes_what_plan_reads(small, tmp_path, capsys, monkeypatch):
    assert calibration.calibration_file() == tmp_path / "cache" / "polyreme" / "calibration.yaml"
    declared = calibration.declared(8)
    measured = replace(declared, device=replace(declared.device, source="polyreme calibrate"))
    monkeypatch.setattr(calibrate, "run", lambda report: measured)
    assert main(["calibrate"]) == 0
    assert "`polyreme plan CONFIG --devices 8` uses it" in capsys.readouterr().out
    assert main(["plan", str(small), "--devices", "8", *FAST]) == 0
    assert "figures of the devices: polyreme calibrate" in capsys.readouterr().out
    assert main(["calibrate", "--output", str(tmp_path)]) == 2
    assert main(["calibrate", "--output", str(tmp_path / "no" / "x.yaml")]) == 2
    assert "there is no folder" in capsys.readouterr().err
