"""Writing text from a run's folder, and choosing tokens."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, NumericsError
from polyreme.generation import SamplingParams
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.recipes.inference import generate
from polyreme.recipes.training.sampling import Chooser, generate_ids
from polyreme.recipes.weights.base import dimensions, load_base
from tests.recipes.tiny_run import train

TEXT = "In the beginning was the word, and the word was with all. " * 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output folder of a short run on text."""
    output = tmp_path_factory.mktemp("generate") / "run"
    text = output.parent / "text.txt"
    text.write_text(TEXT)
    settings = [f"data.text={text}", "data.tokenizer_vocab_size=300", "train.steps=12", "train.learning_rate=1e-2"]
    train(output, *settings, "log.sample_tokens=4")
    clear_plan()
    return output


def write(folder, prompt="In the", chat=False, dtype=None, **changes):
    pieces = []
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0} | changes)
    generate.run(folder, prompt=prompt, params=params, chat=chat, dtype=dtype, say=pieces.append)
    return "".join(pieces)


@pytest.mark.parametrize(("family", "samples"), [("evoformer", "alignments"), ("bert", "masked_words")])
def test_a_run_of_what_writes_no_tokens_is_refused_before_its_weights(tmp_path, family, samples):
    # such a run may have no tokenizer, of which the error would speak
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, {"x": np.zeros(1)}, {"config": {"model.family": family}}, blocking=True)
    for read in (write, lambda run: load_base(str(run)), lambda run: dimensions(str(run), 8)):
        with pytest.raises(ConfigError, match=f"{family} takes {samples}, not tokens; give a decoder's run"):
            read(tmp_path)


@pytest.mark.slow
def test_temperature_zero_has_one_answer_and_a_seed_has_its_own(run):
    first = write(run)
    assert first.startswith("In the")
    assert len(first) > len("In the\n")
    assert write(run, seed=1) == first
    drawn = [write(run, temperature=1.5, seed=seed, max_tokens=16) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_prompt_longer_than_the_window_and_none(run):
    prompt = TEXT[:400]
    out = write(run, prompt=prompt)
    assert out.startswith(prompt)
    assert len(out) > len(prompt) + 1
    assert write(run, prompt="")


@pytest.mark.slow
def test_settings_of_the_text(run):
    whole = write(run)
    text = whole.removeprefix("In the")
    assert write(run, stop=[text[2:4]]) == f"In the{text[: text.index(text[2:4])]}\n"
    assert write(run, n=2) == f"{whole}\n{whole}"
    assert write(run, repetition_penalty=5.0) != whole
    long = write(run, max_tokens=80, repetition_penalty=2.0, temperature=1.0)
    assert write(run, max_tokens=80, repetition_penalty=2.0, temperature=1.0) == long


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, "8"])
def test_command_on_any_number_of_devices(run, devices):
    expected = write(run)
    environment = {name: value for name, value in os.environ.items() if name != "CPU_NUM"}
    settings = ["--prompt", "In the", "--max-new-tokens", "8", "--temperature", "0"]
    result = subprocess.run(
        [sys.executable, "-m", "polyreme.cli.main", "generate", str(run), *settings],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment | ({"CPU_NUM": devices} if devices else {}),
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, expected), result.stderr


def test_folder_may_be_moved_and_its_data_deleted(run, tmp_path):
    expected = write(run)
    shutil.copytree(run, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "data")
    assert write(tmp_path / "moved") == expected


def test_wrong_folders(run, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"neither checkpoints/ nor config\.json in it; give the output folder of a run"
    ):
        write(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in it"):
        write(tmp_path / "run")
    with pytest.raises(CheckpointError, match="neither a folder nor a GGUF file"):
        write(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="a run is read as it was trained, without --dtype"):
        write(run, dtype="bfloat16")
    with pytest.raises(ConfigError, match="no chat template"):
        write(run, chat=True)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "tokenizer.json", tmp_path / "empty")
    with pytest.raises(CheckpointError, match="nothing was saved yet"):
        write(tmp_path / "empty")


@pytest.mark.slow
def test_likeliest_tokens_are_those_of_the_plain_forward():
    model = GPT(GPTConfig.nano(seq_len=4))
    model.eval()
    known = [5, 3, 9]
    for _ in range(6):  # past the window of 4
        known.append(int(model(to_tensor([known[-4:]])).numpy()[0, -1].argmax()))
    assert generate_ids(model, [5, 3, 9], Chooser(temperature=0), max_new_tokens=6) == known[3:]
    end = known[5]
    expected = known[3 : known.index(end, 3)]
    assert generate_ids(model, [5, 3, 9], Chooser(temperature=0), max_new_tokens=6, end=[end]) == expected


def test_training_flag_is_put_back():
    model = GPT(GPTConfig.nano(dropout=0.5))
    model.train()
    generate_ids(model, [1], Chooser(), max_new_tokens=1)
    assert model.training
    with pytest.raises(ConfigError, match="0 prompt tokens"):
        generate_ids(model, [], Chooser(), max_new_tokens=1)


def test_chooser_draws_by_the_softmax_of_the_top_k():
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4]))
    chooser = Chooser(temperature=0.5, top_k=3)
    counts = np.bincount([chooser.choose(logits) for _ in range(4000)], minlength=4)
    expected = np.array([0, 0.2**2, 0.3**2, 0.4**2])
    expected /= expected.sum()
    # 5 standard deviations of a count of 4000 draws
    np.testing.assert_array_less(np.abs(counts / 4000 - expected), 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9)
    assert {Chooser(num_known=2, seed=s).choose(logits) for s in range(20)} == {0, 1}


def test_chooser_refuses():
    with pytest.raises(ConfigError, match="temperature=-1"):
        Chooser(temperature=-1)
    with pytest.raises(ConfigError, match="top_k=-1"):
        Chooser(top_k=-1)
    with pytest.raises(NumericsError, match="1 of 2 logits are not finite"):
        Chooser().choose(np.array([0.0, np.nan]))
