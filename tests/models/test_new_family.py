"""A family that only this file knows is planned, trained, written with and exported: it takes its record.

It is a LLaMA that adds learned positions to its rotary ones, with a feed-forward of three widths, a loss in bits, a
tokenizer of whole words, and no pipeline stage without a block.
"""

import math
import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax
from tokenizers import Tokenizer

from polyreme.cli.main import main
from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.families import FAMILIES, Family, decoder_shape
from polyreme.models.parts.decoder import Decoder, next_token_loss
from polyreme.nn import Embedding
from polyreme.ops.creation import arange
from polyreme.planner import cluster_of_kind
from polyreme.recipes.config import ModelConfig, PretrainConfig
from polyreme.recipes.estimate import num_parameters, shape_of
from polyreme.recipes.planning.plan import training_of
from polyreme.recipes.training.logs import read_jsonl
from polyreme.recipes.weights.base import load_trained
from polyreme.recipes.weights.build import build_model
from polyreme.registry import Reference
from tests.recipes.tiny_run import load, train


@dataclass(frozen=True)
class PlacedConfig(LlamaConfig):
    """Dimensions of a Placed."""

    def __post_init__(self):
        object.__setattr__(self, "ffn_size", self.ffn_size or PLACED.ffn_size(self.hidden_size))
        super().__post_init__()


class Placed(Llama):
    """A Llama with a table of positions beside."""

    def __init__(self, config):
        super().__init__(config)
        self.positions = Embedding(config.seq_len, config.hidden_size, dims=(None, "embed"))

    def placed(self, x_bse, cache=None):
        count = x_bse.shape[1]
        return x_bse + self.positions(arange(count) if cache is None else cache.positions(count))

    def embedding_layers(self):
        return {"tokens": self.tokens, "positions": self.positions}


def bits_a_token(model, hidden, labels):
    return next_token_loss(model, hidden, labels) / math.log(2)


PLACED = Family(
    name="placed",
    model=Reference(__name__, "Placed"),
    config=Reference(__name__, "PlacedConfig"),
    shape=partial(decoder_shape, gated=True, biases=False, rms_norm=True),
    ffn_size=lambda hidden: 3 * hidden,
    loss=Reference(__name__, "bits_a_token"),
    tokenizer=Reference("tests.recipes.words", "train_words"),
    cut="layers",
    grouped_heads=True,
)


@pytest.fixture(autouse=True)
def _known_here_only():
    with FAMILIES.registered(PLACED):
        yield
    clear_plan()
    assert "placed" not in FAMILIES


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", [*(n for n, f in FAMILIES.items() if f.samples == "tokens"), "placed"])
def test_what_a_record_says_is_so(name):
    family = FAMILIES[name]
    config_class = family.config.load()
    known = {field.name for field in fields(config_class)}
    assert ("num_kv_heads" in known, "dropout" in known) == (family.grouped_heads, family.dropout)
    assert {*family.settings} <= known
    config = ModelConfig(family=name, vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, seq_len=8)
    assert config_class(hidden_size=32, num_heads=4).ffn_size == config.ffn_size
    model = build_model(config)
    assert isinstance(model, Decoder)
    assert model.family is family
    # as a pipeline cuts it: as often as the planner counts, and no parameter is left out
    items = model.pipeline_items()
    assert len(items) == shape_of(config).graph().num_items(family.cut)
    assert {id(p) for item in items for p in item.parameters()} == {id(p) for p in model.parameters()}


def test_what_it_has_not_is_refused():
    with pytest.raises(ConfigError, match="there is a model family 'placed' already"):
        FAMILIES.register(PLACED)
    with pytest.raises(ValueError, match="placed has no dropout; set it to 0 or family: gpt"):
        ModelConfig(family="placed", dropout=0.1)
    with pytest.raises(
        ValueError, match=r"gpt has no grouped heads; leave num_kv_heads out or set family: llama or .*pl"
    ):
        ModelConfig(num_heads=4, num_kv_heads=2)
    model = {"num_layers": 4, "dropout": 0.0}
    PretrainConfig.model_validate({"model": {"family": "gpt", **model}, "plan": {"pp": 6}})
    with pytest.raises(ValueError, match="pp=6 with 1 chunks a stage cuts the model in 6, but it has 4 layers to cut"):
        PretrainConfig.model_validate({"model": {"family": "placed", **model}, "plan": {"pp": 6}})
    with pytest.raises(ConfigError, match="has no 'bits_per_token'; did you mean 'bits_a_token'"):
        Reference(__name__, "bits_per_token").load()


def test_the_page_is_true():
    page = (Path(__file__).parents[2] / "docs" / "adding_a_model.md").read_text()
    for name in re.findall(r"^\| `(\w+)\(", page, re.M):
        assert hasattr(Decoder, name), name


def test_from_a_configuration_to_an_artefact(tmp_path, capsys):
    output, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("In the beginning was the word, and the word was with all. " * 200)
    plan = ["plan.dp=4", "plan.pp=2", "plan.mp=1", "plan.sharding=1", "plan.sharding_stage=0", "train.accumulation=2"]
    model = ["model.family=placed", "model.num_layers=2", "model.num_kv_heads=2", "model.dropout=0"]
    log = ["log.validation_interval=2", "log.validation_batches=1"]
    settings = [*plan, *model, *log, f"data.text={text}", "data.validation_fraction=0.1", "train.warmup_steps=0"]
    config = load(output, *settings).config
    assert training_of(config, cluster_of_kind("a100", 8)).cut == "layers"

    assert main(["plan", str(tmp_path / "run.yaml"), *settings, "--topology", "a100:4"]) == 0
    assert f"placed of {num_parameters(config.model):,} parameters" in capsys.readouterr().out

    train(output, *settings, "train.steps=2")
    clear_plan()
    losses = [row["loss"] for row in read_jsonl(output / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 3  # of two steps, and of the validation
    assert losses[0] == pytest.approx(math.log2(512), rel=0.05)  # bits: a fresh model thinks all tokens alike
    trained, _ = load_trained(output)
    assert type(trained) is Placed
    assert sum(p.size for p in trained.parameters()) == num_parameters(config.model)
    tokens = np.arange(16).reshape(1, 16)
    likely = np.take_along_axis(log_softmax(trained(to_tensor(tokens)).numpy(), -1), tokens[..., None], -1)
    loss = trained(to_tensor(tokens), to_tensor(tokens))
    np.testing.assert_allclose(float(loss), -likely.mean() / np.log(2), rtol=1e-5)  # 512 terms of float32

    assert Tokenizer.from_file(str(output / "tokenizer.json")).encode("was with all.").tokens == ["was", "with", "all."]
    assert main(["generate", str(output), "--prompt", "In the word,", "--max-new-tokens", "4"]) == 0
    assert "In the word, " in capsys.readouterr().out
    assert main(["export", str(output), str(tmp_path / "net"), "--platform", "cpu"]) == 0
    assert "step 2 of" in capsys.readouterr().out
