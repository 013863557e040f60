"""The command line: help, refusals, exit codes, and what it hands to the recipes."""

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyreme.cli.failure import exit_code
from polyreme.cli.main import app, main
from polyreme.errors import CheckpointError, ConfigError, DataError, NumericsError, PlacementError, ShapeError
from polyreme.generation import SamplingParams
from polyreme.recipes.config_file import known_keys

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "gpt_kjv.yaml")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "polyreme", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )


@pytest.fixture
def recipe(monkeypatch):
    """Stands in for a recipe: records its call, or raises what the test sets."""

    def install(name):
        package, _, last = f"polyreme.recipes.{name}".rpartition(".")
        module = types.ModuleType(f"polyreme.recipes.{name}")
        module.calls, module.error = [], None

        def record(*arguments, **settings):
            module.calls.append((arguments, settings))
            if module.error:
                raise module.error

        module.run = record
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(importlib.import_module(package), last, module, raising=False)
        return module

    return install


def test_help_names_every_command():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("pretrain", "generate", "doctor", "data", "--version", "--debug"):
        assert name in result.output


def test_help_does_not_import_jax():
    code = "import sys; from polyreme.cli.main import main; main(['--help']); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_help_is_quick():
    best = 9.0
    for _ in range(3):
        start = os.times()
        assert run("--help").returncode == 0
        end = os.times()
        best = min(best, end.children_user + end.children_system - start.children_user - start.children_system)
    # of the processor, whatever else runs: 0.2 s, and 0.5 s is what we promise; twice that only catches an import that
    # should not be there
    assert best < 1.0


def test_version_is_printed():
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("polyreme ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretran", CONFIG], "no such command 'pretran'. Did you mean 'pretrain'?"),
        (["data", "previw", CONFIG], "no such command 'previw'. Did you mean 'preview'?"),
        (["data", "zzzz", CONFIG], "no such command 'zzzz'; polyreme data --help lists them"),
        (["pretrain", CONFIG, "--rezume", "never"], "unknown option --rezume; did you mean --resume?"),
        (["pretrain", CONFIG, "--zzzzzzzz"], "unknown option --zzzzzzzz; see --help"),
        (["pretrain", CONFIG, "--resume"], "option '--resume' requires an argument"),
        (["pretrain", CONFIG, "--dry-run=yes"], "option '--dry-run' does not take a value"),
        (["--debag"], "unknown option --debag; did you mean --debug?"),
        (["pretrain"], "missing argument"),
        (["pretrain", "nowhere.yaml"], "nowhere.yaml: no such configuration file"),
        (
            ["pretrain", CONFIG, "train.lerning_rate=1"],
            "unknown key 'train.lerning_rate'; did you mean 'train.learning_",
        ),
        (["pretrain", CONFIG, "train.learning_rate=-1"], "train.learning_rate: input should be greater than 0, got -1"),
        (["pretrain", CONFIG, "--resume", "nver"], "--resume nver: needs auto, never or the number of a step; did you"),
        (["pretrain", CONFIG, "--output", ""], "output: string should have at least 1 character, got ''"),
        (["generate", "nowhere"], "nowhere: no such folder or file; give the output folder of a run, a folder"),
        (["generate", ".", "--temperature", "inf"], "--temperature inf: needs a number"),
        (["generate", ".", "--num-beams", "2", "--top-k", "3"], "--top-k: a beam search does not read it"),
        (["generate", ".", "--length-penalty", "2"], "--length-penalty is of a beam search; give --num-beams too"),
        (["generate", ".", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["data", "preview", CONFIG, "-n", "x"], "'-n'"),
    ],
)
def test_refusals_are_one_line_and_exit_2(capsys, arguments, message):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    line, *more = err.splitlines()
    assert message in line
    assert more in ([], ["more: polyreme explain PR301"], ["more: polyreme explain PR402"])  # usage has no code


def test_refusals_in_a_real_process():
    result = run("pretrain", CONFIG, "train.stps=3")
    assert result.returncode == 2
    first, last = result.stderr.splitlines()
    assert first == "error: command line: unknown key 'train.stps'; did you mean 'train.steps'?"
    assert last == "more: polyreme explain PR301"
    assert run("pretran").returncode == 2
    assert run().returncode == 2


def test_debug_shows_the_traceback_wherever_it_stands():
    words = ["pretrain", CONFIG, "train.stps=3"]
    for arguments in (["--debug", *words], [*words, "--debug"]):
        result = run(*arguments)
        assert result.returncode == 2
        assert "Traceback" in result.stderr
        assert result.stderr.rstrip().splitlines()[-2].startswith("error: command line: unknown key")
    assert "Traceback" in run(*words, POLYREME_DEBUG="1").stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (PlacementError("x"), 2),
        (DataError("x"), 3),
        (CheckpointError("x"), 4),
        (NumericsError("x"), 5),
        (ShapeError("x"), 70),
        (KeyError("x"), 70),
        (KeyboardInterrupt(), 130),
        (SystemExit(75), 75),
        (SystemExit(None), 0),
        (SystemExit("words"), 1),
    ],
    ids=lambda value: getattr(type(value), "__name__", "") if isinstance(value, BaseException) else str(value),
)
def test_exit_code_of_every_ending(capsys, recipe, error, code):
    recipe("training.run").error = error
    assert main(["pretrain", CONFIG]) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    if code == 70:
        assert "run again with --debug" in err


def test_out_of_memory_names_the_cheapest_fixes(capsys, recipe):
    class JaxRuntimeError(RuntimeError):
        pass

    recipe("training.run").error = JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    assert main(["pretrain", CONFIG]) == 2
    err = capsys.readouterr().err
    settings = ("train.amp_level=O1", "train.accumulation=4", "plan.dp=1 plan.sharding=4 plan.sharding_stage=3")
    for number, fix in enumerate(settings, 1):
        saving = re.search(rf"{number}\) {re.escape(fix)}: ([\d.]+) [KMG]iB a device less", err)
        assert saving, err
        assert float(saving[1]) > 0
    assert err.endswith("more: polyreme explain PR105\n")
    assert exit_code(JaxRuntimeError("INTERNAL: other")) == 70


def test_what_pretrain_hands_to_the_recipe(recipe, monkeypatch):
    monkeypatch.delenv("CPU_NUM")
    module = recipe("training.run")
    words = ["train.steps=70", "train.learning_rate=1e-4"]
    assert main(["pretrain", CONFIG, *words, "--resume", "5", "--output", "a: b #船"]) == 0
    ((config,), settings) = module.calls[0]
    assert (config.train.steps, config.train.learning_rate, config.output) == (70, 1e-4, "a: b #船")
    assert settings["resume"] == "5"
    source = settings["overrides_source"]
    assert source["folder"] == ROOT / "configs"
    assert source["origin"]["train.steps"] == "command line"
    assert source["resume_command"][:5] == ["polyreme", "pretrain", CONFIG, *words]
    assert source["resume_command"][-2:] == ["--resume", "auto"]
    assert os.environ["CPU_NUM"] == "16"  # the plan's devices, as the configuration asks for the cpu
    assert main(source["resume_command"][1:]) == 0
    assert module.calls[1][0] == (config,)


def test_cpu_num_of_the_user_stays(recipe, monkeypatch):
    monkeypatch.setenv("CPU_NUM", "4")
    recipe("training.run")
    assert main(["pretrain", CONFIG]) == 0
    assert os.environ["CPU_NUM"] == "4"


def test_cpu_asked_for_and_left_out(recipe, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    recipe("training.run")
    assert main(["pretrain", CONFIG]) == 2
    assert "device=cpu, but JAX_PLATFORMS=cuda" in capsys.readouterr().err


def test_what_generate_hands_to_the_recipe(recipe, tmp_path):
    module = recipe("inference.generate")
    words = ["--prompt", "In the", "--max-new-tokens", "9", "--temperature", "0.5", "--top-k", "3", "--seed", "4"]
    words += ["--speculative", "ngram", "--num-draft-tokens", "3", "--adapter", "a", "--kv-cache-dtype", "int8"]
    assert main(["generate", str(tmp_path), *words]) == 0
    ((places, settings),) = module.calls
    del settings["say"]
    params = SamplingParams(max_tokens=9, temperature=0.5, top_k=3, seed=4)
    assert places == (tmp_path,)
    assert settings == {
        "prompt": "In the",
        "params": params,
        "chat": False,
        "dtype": None,
        "speculative": "ngram",
        "num_draft_tokens": 3,
        "adapter": Path("a"),
        "kv_cache_dtype": "int8",
        "images": (),
    }


def test_settings_lists_every_key_with_its_default_and_what_sections_say():
    text = run("pretrain", "--settings").stdout
    for key in known_keys():
        assert f"  {key} = " in text
    assert "  data.skip_bad = 0" in text
    assert "skip_bad: lines of text that may be left out" in text
    assert ">>>" not in text


def test_dry_run_shows_settings_origins_and_costs():
    result = run("pretrain", "configs/gpt_kjv.yaml", "train.steps=70", "--dry-run")
    assert result.returncode == 0
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["train.steps"] == ["train.steps", "70", "command", "line"]
    assert rows["model.num_layers"][2].startswith("configs/gpt_kjv.yaml:")
    assert rows["train.seed"][2] == "default"
    assert rows["parameters"] == ["parameters", "4,240,896"]
    assert rows["steps"][:3] == ["steps", "70", "of"]
    assert rows["memory"][1] == "about"
    assert "dp2 pp2 sharding2 mp2  (16 devices)" in result.stdout


def test_a_dry_run_refuses_an_exchange_that_the_device_has_not(capsys):
    command = ["pretrain", str(ROOT / "configs/moe_kjv.yaml"), "plan.expert_dispatch=ragged", "--dry-run"]
    assert main(command) == 2
    wanted = "XLA has no ragged all-to-all on CPU; set plan.expert_dispatch to padded, gather or balanced"
    assert wanted in " ".join(capsys.readouterr().err.split())
    assert main([*command, "device=tpu"]) == 0


def test_data_preview(tmp_path):
    with gzip.open(ROOT / "data" / "kjv.txt.gz") as whole:
        (tmp_path / "start.txt").write_bytes(whole.read(100_000))
    settings = [f"output={tmp_path}/a b 船", f"data.text={tmp_path}/start.txt", "data.validation_fraction=0.2"]
    result = run("data", "preview", CONFIG, *settings, "-n", "2")
    assert result.returncode == 0, result.stderr
    assert "Ge1:1 In the beginning God created the heaven and the earth." in result.stdout
    assert result.stdout.count("--- sample") == 2
    assert "128 tokens, 128 counted in the loss" in result.stdout


def test_data_preview_of_synthetic_tokens(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(f"data: {{synthetic_tokens: 200000}}\noutput: {tmp_path}\n")
    assert main(["data", "preview", str(tmp_path / "run.yaml"), "-n", "1"]) == 0
    assert "200,000 tokens of a vocabulary of 4,096" in capsys.readouterr().out


def test_missing_data_exits_3(capsys):
    assert main(["data", "preview", CONFIG, "data.text=nowhere.txt"]) == 3
    assert "no file 'nowhere.txt'" in capsys.readouterr().err


# main handles it for every command
@pytest.mark.slow_cases("doctor")
@pytest.mark.parametrize("words", ["--help", f"pretrain '{CONFIG}' --dry-run", "doctor"])
def test_reader_that_leaves_early(words):
    command = f"'{sys.executable}' -m polyreme.cli.main {words} | head -1 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_terminal_that_cannot_show_a_character(tmp_path):
    path = tmp_path / "船.yaml"
    path.write_text("output: 出力", encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    result = run("pretrain", str(path), "--dry-run", **plain)
    assert result.returncode == 0, result.stderr
    assert "出力" in result.stdout or "\\u51fa\\u529b" in result.stdout  # as UTF-8 or escaped, by Typer's version
    assert run("--help", **plain).returncode == 0
    path.write_text(f"output: {tmp_path}/出力", encoding="utf-8")
    result = run("pretrain", str(path), "data.synthetic_tokens=1000", "plan.dp=8", **plain)
    assert result.returncode == 2
    assert "cannot be a path in this locale (ascii); set LC_ALL=C.UTF-8" in result.stderr


def test_doctor_in_json_and_failing(tmp_path):
    result = run("doctor", "--json")
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout)["ok"] is True
    (tmp_path / "file").write_text("in the way")
    result = run("doctor", POLYREME_COMPILE_CACHE=str(tmp_path / "file"), HF_TOKEN="hf_verysecret")
    assert result.returncode == 1
    assert "FAIL compile cache" in result.stdout
    assert "fix: set POLYREME_COMPILE_CACHE" in result.stdout
    assert "verysecret" not in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('train: !!bool "q"', "c.yaml:1: not YAML: a value that is no bool"),
        ('train:\n  steps: !!int ""', "c.yaml:2: not YAML: a value that is no int"),
        ('train: {seed: !!timestamp "z"}', "a value that is no timestamp"),
        ("train: {seed: !!python/object:os.system x}", "could not determine a constructor"),
        ("a: \x01", "special characters are not allowed"),
        ("a: " + "[" * 20_000, "nested deeper than 32 levels"),
        ("- " * 20_000, "nested deeper than 32 levels"),
        ('output: "a\\0b"', "c.yaml:1: output: 'a\\x00b' has a character that cannot be shown"),
        (f"plan: {{dp: 8}}\noutput: {'x' * 300}", "File name too long"),
        (f"plan: {{dp: 8}}\ndata: {{text: {'x' * 300}}}", "data.text: no file"),
        ("data: {synthetic_tokens: 1e13}", "less than or equal to 1000000000"),
        ("data: {worker_timeout: -1}", "data.worker_timeout: input should be greater than or equal to 0"),
    ],
)
def test_every_configuration_is_taken_or_refused(tmp_path, monkeypatch, capfd, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    start = time.process_time()
    assert main(["pretrain", "c.yaml"]) in (2, 3)
    assert message in " ".join(capfd.readouterr().err.split())
    assert time.process_time() - start < 5


def test_streams_that_cannot_be_written():
    for stdout, code in ((">&-", 0), (">/dev/full", 2)):
        command = f"{sys.executable} -m polyreme --version {stdout}"
        ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, "Traceback" in ended.stderr) == (code, False)
    assert ended.stderr == "error: No space left on device; make room there, or choose another folder\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(28, "No space left on device", "/data/x"), 2, "/data/x: No space left on device; make room"),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x: Permission denied; choose a path"),
        (OSError(36, "File name too long", "/" + "x" * 300), 2, "x...: File name too long; give a shorter path"),
        (MemoryError("Unable to allocate 1 TiB"), 2, "out of memory: Unable to allocate 1 TiB"),
        (OSError(9, "Bad file descriptor"), 70, "internal error: OSError"),
    ],
)
def test_what_the_machine_lacks_is_no_internal_error(recipe, capsys, error, code, message):
    recipe("doctor").examine = lambda timeout: (_ for _ in ()).throw(error)
    assert main(["doctor"]) == code
    assert message in capsys.readouterr().err
