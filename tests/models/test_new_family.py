"""A family that only this file knows is planned, trained, written with and exported: it takes its record.

It is a LLaMA that adds learned positions to its rotary ones, with a feed-forward of three widths.
"""

import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from polyreme.cli.main import main
from polyreme.distributed.placement import clear_plan
from polyreme.errors import ConfigError
from polyreme.models.decoder import Decoder
from polyreme.models.families import FAMILIES, Family, decoder_shape
from polyreme.models.llama import Llama, LlamaConfig
from polyreme.nn import Embedding
from polyreme.ops.creation import arange
from polyreme.recipes.build import classes_of
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.estimate import num_parameters
from polyreme.recipes.logs import read_jsonl
from polyreme.recipes.trained import load_trained
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

    def placed(self, x_bse):
        return x_bse + self.positions(arange(x_bse.shape[1]))

    def embedding_layers(self):
        return {"tokens": self.tokens, "positions": self.positions}


PLACED = Family(
    name="placed",
    module=__name__,
    model="Placed",
    config="PlacedConfig",
    shape=partial(decoder_shape, gated=True, biases=False, rms_norm=True),
    ffn_size=lambda hidden: 3 * hidden,
    grouped_heads=True,
)


@pytest.fixture(autouse=True)
def _known_here_only():
    with FAMILIES.registered(PLACED):
        yield
    clear_plan()
    assert "placed" not in FAMILIES


@pytest.mark.parametrize("name", [*FAMILIES, "placed"])
def test_what_a_record_says_of_its_config_class_is_so(name):
    family = FAMILIES[name]
    model_class, config_class = classes_of(family)
    assert issubclass(model_class, Decoder)
    known = {field.name for field in fields(config_class)}
    assert ("num_kv_heads" in known, "dropout" in known) == (family.grouped_heads, family.dropout)
    assert config_class(hidden_size=96, num_heads=4).ffn_size == ModelConfig(family=name, hidden_size=96).ffn_size


def test_what_it_has_not_is_refused():
    with pytest.raises(ConfigError, match="there is a model family 'placed' already"):
        FAMILIES.register(PLACED)
    with pytest.raises(ValueError, match="placed has no dropout; set it to 0 or family: gpt"):
        ModelConfig(family="placed", dropout=0.1)
    with pytest.raises(ValueError, match="gpt has no grouped heads; leave num_kv_heads out or set family: llama or pl"):
        ModelConfig(num_heads=4, num_kv_heads=2)


def test_the_page_is_true():
    page = (Path(__file__).parents[2] / "docs" / "adding_a_model.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(code, "docs/adding_a_model.md", "exec"), {})
    for name in re.findall(r"^\| `(\w+)\(", page, re.M):
        assert hasattr(Decoder, name), name


def test_from_a_configuration_to_an_artefact(tmp_path, capsys):
    output, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("In the beginning was the word, and the word was with all. " * 200)
    plan = ["plan.dp=8", "plan.mp=1", "plan.sharding=1", "plan.sharding_stage=0"]
    model = ["model.family=placed", "model.num_kv_heads=2", "model.dropout=0"]
    settings = [*plan, *model, f"data.text={text}", "data.tokenizer_vocab_size=300", "train.warmup_steps=0"]
    config = load(output, *settings).config

    assert main(["plan", str(tmp_path / "run.yaml"), *settings, "--topology", "a100:4"]) == 0
    assert f"placed of {num_parameters(config.model):,} parameters" in capsys.readouterr().out

    train(output, *settings, "train.steps=2")
    clear_plan()
    losses = [row["loss"] for row in read_jsonl(output / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    trained, _ = load_trained(output)
    assert type(trained) is Placed
    assert sum(p.size for p in trained.parameters()) == num_parameters(config.model)
    # as a pipeline cuts it, no parameter is left out
    parts = {id(p) for item in trained.pipeline_items() for p in item.parameters()}
    assert parts == {id(p) for p in trained.parameters()}

    assert main(["generate", str(output), "--prompt", "In the", "--max-new-tokens", "4"]) == 0
    assert "In the" in capsys.readouterr().out
    assert main(["export", str(output), str(tmp_path / "net"), "--platform", "cpu"]) == 0
    assert "step 2 of" in capsys.readouterr().out
