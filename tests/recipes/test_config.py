"""Configurations: defaults, the checks between settings, files, overrides, and what a refusal says."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from polyreme.errors import ConfigError
from polyreme.mesh import RECOMPUTE, Plan
from polyreme.recipes import estimate
from polyreme.recipes.config import ModelConfig, PlanConfig, PretrainConfig, TrainConfig, digest, flatten
from polyreme.recipes.config_file import known_keys, load, nearest
from polyreme.recipes.planning.plan import memory_of
from polyreme.recipes.weights.build import build_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def test_left_out_dimensions_follow_from_the_others():
    assert ModelConfig(hidden_size=64, num_heads=4).ffn_size == 256
    assert ModelConfig(num_heads=4).num_kv_heads == 4
    assert ModelConfig(family="llama", hidden_size=256).ffn_size == 704  # 8/3 x 256 = 682.7, rounded up to 64s


def test_origin_of_every_value(write):
    path = write("train:\n  steps: 20\n  global_batch: 8\n")
    loaded = load(path, ["train.global_batch=4", "output=elsewhere"])
    assert loaded.origin["train.steps"] == f"{path}:2"
    assert loaded.origin["train.global_batch"] == "command line"
    assert loaded.origin["train.seed"] == "default"
    assert set(loaded.origin) == set(known_keys()) == set(flatten(loaded.config))
    assert (loaded.config.train.steps, loaded.config.train.global_batch, loaded.config.output) == (20, 4, "elsewhere")


@pytest.mark.parametrize("text", ["1e-4", '"1e-4"', "0.0001", "1.0e-4", "+1e-4"])
def test_numbers_in_any_spelling(write, text):
    assert load(write(f"train: {{learning_rate: {text}}}")).config.train.learning_rate == 1e-4
    assert load(write("output: x"), [f"train.learning_rate={text}"]).config.train.learning_rate == 1e-4


def test_whole_number_written_as_a_power(write):
    assert load(write("train: {steps: 1e3}")).config.train.steps == 1000


def test_one_text_or_several(write):
    assert load(write("data: {text: a.txt}")).config.data.text == ["a.txt"]
    assert load(write("data: {text: [a.txt, b.gz]}")).config.data.text == ["a.txt", "b.gz"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  lerning_rate: 1\n",
            r"run\.yaml:2: train\.lerning_rate: unknown key; did you mean 'train\.learning",
        ),
        ("learning_rate: 1\n", r"run\.yaml:1: learning_rate: unknown key; did you mean 'train\.learning_rate'"),
        (
            "train: {lerning_rate: 1, stps: 3, warmup: 1}\n",
            r"unknown key.* \(wrong as well: train\.stps, train\.warmup\)",
        ),
        ("train:\n  steps: -3\n", r"run\.yaml:2: train\.steps: .*greater than or equal to 1, got -3"),
        ("train: {learning_rate: .nan}", r"train\.learning_rate: .*greater than 0, got nan"),
        ("train: {learning_rate: .inf}", r"train\.learning_rate: .*finite number, got inf"),
        ("train: {learning_rate: fast}", r"train\.learning_rate: .*valid number, got 'fast'"),
        ("train: {steps: 1.5}", r"train\.steps: .*integer, got 1\.5"),
        ("train: {steps: true}", r"train\.steps: .*integer, got True"),
        ("train: {betas: [0.9, 1.5]}", r"train\.betas: .*less than 1, got 1\.5"),
        ("train: 3", r"train: .*got 3"),
        ("model: {family: gtp}", r"model\.family: unknown model family 'gtp'; did you mean 'gpt'"),
        ("model: {family: resnet}", r"model\.family: unknown model family 'resnet'; the choices are gpt, llama"),
        ("model: {family: [gpt]}", r"model\.family: .*valid string, got \['gpt'\]"),
        ("plan: {pp: 2, schedule: ZBH}", r"plan\.schedule: unknown schedule 'ZBH'; did you mean 'ZBH1'"),
        ("train: {steps: 1, steps: 2}", r"run\.yaml:1: train\.steps is given twice"),
        ("train: {steps: [}", r"run\.yaml:1: not YAML"),
        ("- a\n- b", r"run\.yaml:1: expected key: value lines"),
        ("", r"run\.yaml: the file is empty"),
        ("output: !!python/object/apply:os.system [ls]", r"run\.yaml:1: not YAML: could not determine a constructor"),
        ("a: &a [x, x]\nb: &b [*a, *a, *a]\ntrain: {steps: [*b, *b]}", r"unknown key|got \["),
        ("model: {hidden_size: 100}", r"hidden_size=100 is not a multiple of num_heads=8; nearest is 96"),
        ("model: {num_kv_heads: 3}", r"num_heads=8 is not a multiple of num_kv_heads=3"),
        ("model: {num_kv_heads: 2}", r"gpt has no grouped heads"),
        ("model: {family: llama, dropout: 0.1}", r"llama has no dropout"),
        ("train: {warmup_steps: 500}", r"warmup_steps=500 is more than steps=400"),
        ("train: {min_lr: 1.0}", r"min_lr=1\.0 is above learning_rate=0\.001"),
        ("train: {accumulation: 3}", r"global_batch=16 is not a multiple of accumulation=3"),
        ("plan: {mp: 3}", r"model\.num_heads=8 is not a multiple of plan\.mp=3"),
        ("plan: {dp: 5}", r"train\.global_batch=16 is not a multiple of plan\.dp x .*=5; nearest is 15"),
        ("plan: {sharding: 2}", r"sharding=2 with sharding_stage=0: set both"),
        ("plan: {sharding_stage: 3}", r"sharding=1 with sharding_stage=3: set both"),
        (
            "plan: {recompute: full, recompute_share: 0.1}",
            r"recompute_share=0\.1 of model\.num_layers=4 is no block, .* give at least 0\.25",
        ),
        ("plan: {sharding: 2, sharding_stage: 4}", r"less than or equal to 3, got 4"),
        ("data: {tokenizer_vocab_size: 5000}", r"tokenizer_vocab_size=5000 is more than model\.vocab_size=4096"),
    ],
)
def test_refusals_name_file_key_and_remedy(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load(write(text))


@pytest.mark.parametrize(
    "text",
    [
        "model: {family: canary_module.Model}",
        "model: {family: ./canary_module.py}",
        "auto_map: {AutoModel: canary_module.Model}",
        "model: {auto_map: {AutoModel: canary_module.Model}}",
        "model: !!python/name:canary_module.Model",
        "model: !!python/object/new:canary_module.Model {}",
    ],
)
def test_a_configuration_that_names_code_imports_none(write, tmp_path, monkeypatch, text):
    (tmp_path / "canary_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        load(write(text))
    assert "canary_module" not in sys.modules


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "command line: 'train.steps' is not key=value"),
        ("train.stps=1", r"command line: unknown key 'train\.stps'; did you mean 'train\.steps'"),
        ("plan.overlap={mo: 2}", r"plan\.overlap: unknown key 'mo' in it; did you mean 'moe'"),
        ("train.lr=1", r"unknown key 'train\.lr'; did you mean 'train\.learning_rate'"),
        ("train=1", r"command line: train is a section; set one of its keys, such as train\.steps"),
        ("train.steps=[1", r"command line: train\.steps: '\[1' cannot be read"),
        ("train.steps=0", r"command line: train\.steps: .*got 0"),
        ("output=caf\udce9", r"command line: output: 'caf\\udce9' has bytes that are not utf-8; .* set LC_ALL"),
    ],
)
def test_refused_overrides(write, override, message):
    with pytest.raises(ConfigError, match=message):
        load(write("output: x"), [override])


def test_override_inside_a_value(write):
    with pytest.raises(ConfigError, match=r"command line: train\.steps: train holds a value"):
        load(write("train: 3"), ["train.steps=1"])


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "gpt_kjv.yaml").write_text("output: x")
    with pytest.raises(ConfigError, match=r"no such configuration file; did you mean 'gpt_kjv\.yaml'"):
        load(tmp_path / "gpt_kjv.yml")
    with pytest.raises(ConfigError, match=r"no such configuration file; `polyreme examples` writes"):
        load(tmp_path / "ds.yaml")  # near by ".yaml" alone
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"output: caf\xe9")
    with pytest.raises(ConfigError, match="byte 11 is not UTF-8"):
        load(tmp_path / "latin.yaml")
    (tmp_path / "long.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="too long for a configuration"):
        load(tmp_path / "long.yaml")


def test_path_with_spaces_and_other_scripts(tmp_path):
    folder = tmp_path / "a b 船"
    folder.mkdir()
    (folder / "run.yaml").write_text("output: 出力 1", encoding="utf-8")
    assert load(folder / "run.yaml").config.output == "出力 1"


def test_digest_depends_on_values_alone(write):
    by_file = load(write("train: {steps: 20}")).config
    assert digest(by_file) == digest(PretrainConfig(train=TrainConfig(steps=20)))
    assert digest(by_file) != digest(PretrainConfig(train=TrainConfig(steps=21)))
    assert json.loads(json.dumps(flatten(by_file))) == flatten(by_file)


def test_nothing_near():
    assert nearest("zzz", ["train.steps"]) == ""


def test_parallel_plan():
    config = PretrainConfig(plan=PlanConfig(dp=2, sharding=2, mp=2, sharding_stage=3, recompute="full"))
    plan = Plan.from_degrees(dp=2, sharding=2, mp=2, sharding_stage=3, recompute="full")
    assert config.parallel_plan == plan
    assert PretrainConfig().parallel_plan == Plan()
    assert [PlanConfig(recompute=name).recompute for name in RECOMPUTE] == list(RECOMPUTE)


def _gpt_shapes(m):
    h, f = m.hidden_size, m.ffn_size
    block = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, f), (f,), (f, h), (h,)]
    return [(m.vocab_size, h), (m.seq_len, h), *block * m.num_layers, (h,), (h,)]


def _llama_shapes(m):
    h, f, kv = m.hidden_size, m.ffn_size, m.hidden_size // m.num_heads * m.num_kv_heads
    block = [(h,), (h, h), (h, kv), (h, kv), (h, h), (h,), (h, f), (h, f), (f, h)]
    return [(m.vocab_size, h), *block * m.num_layers, (h,)]


@pytest.mark.parametrize(
    ("shapes", "model"),
    [
        (_gpt_shapes, ModelConfig(vocab_size=512, hidden_size=48, num_layers=3, num_heads=4, seq_len=32)),
        (_llama_shapes, ModelConfig(family="llama", vocab_size=512, hidden_size=48, num_heads=4, num_kv_heads=2)),
    ],
)
def test_parameter_count_is_the_sum_of_the_shapes(shapes, model):
    count = sum(int(np.prod(shape)) for shape in shapes(model))
    assert estimate.num_parameters(model) == count
    untied = model.model_copy(update={"tie_embeddings": False})
    assert estimate.num_parameters(untied) == count + model.vocab_size * model.hidden_size


def test_flops_do_not_depend_on_tying():
    tied = ModelConfig()
    untied = ModelConfig(tie_embeddings=False)
    assert estimate.flops_per_token(tied) == estimate.flops_per_token(untied)
    h, f = tied.hidden_size, tied.ffn_size
    weights = tied.num_layers * (4 * h * h + 2 * h * f) + tied.vocab_size * h
    # biases and norms are counted as matmul parameters: under half a per cent
    attention = 12 * tied.num_layers * h * tied.seq_len
    assert 0 <= estimate.flops_per_token(tied) / (6 * weights + attention) - 1 < 0.005


@pytest.mark.parametrize(("stage", "parameters", "gradients"), [(1, 4, 4), (2, 4, 2), (3, 2, 2)])
def test_memory_of_each_sharding_stage(stage, parameters, gradients):
    memory = memory_of(PretrainConfig(plan=PlanConfig(sharding=2, sharding_stage=stage)))
    count = estimate.num_parameters(PretrainConfig().model)
    assert (memory.parameters, memory.optimizer) == (parameters * count, 4 * count)
    assert memory.gradients <= gradients * count  # those that are there when the device holds most


def test_recompute_holds_less():
    held = [memory_of(PretrainConfig(plan=PlanConfig(recompute=r))).activations for r in RECOMPUTE]
    assert held[0] >= held[1] > held[2] > held[3]


def test_the_balance_loss_left_out_is_the_familys():
    families = {"mixtral": 0.01, "qwen3_moe": 0.001, "gpt": 0.0}
    for family, weight in families.items():
        assert ModelConfig(family=family).balance_loss == weight
        if weight:
            assert build_model(ModelConfig(family=family, num_layers=1)).config.balance_loss == weight
    assert ModelConfig(family="mixtral", routing="hash").balance_loss == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"family": "llama", "balance_loss": 0.1}},
            "balance_loss=0.1: llama has none; .* mixtral or qwen2_moe or qwen3_moe",
        ),
        (
            {"model": {"family": "mixtral", "balance_scope": "global_batch", "balance_loss": 0.0}},
            "balance_scope=global_batch without a balance_loss; give its weight, or leave the scope out",
        ),
        (
            {"model": {"family": "mixtral", "routing": "hash", "balance_loss": 0.1}},
            "balance_loss=0.1 with routing=hash, which no loss balances",
        ),
        ({"model": {"head_dim": 8}}, "head_dim=8: gpt has none"),
        ({"model": {"num_experts": 4}}, "num_experts=4: gpt has no experts; leave it out"),
        ({"model": {"family": "mixtral", "num_experts": 0}}, "num_experts=0: mixtral has experts; give at least 1"),
        (
            {"model": {"family": "mixtral", "capacity_factor": 1e-4}},
            r"an expert 0\.051 of .* give at least 0\.002",
        ),
        ({"model": {"family": "mixtral", "experts_per_token": 9}}, "experts_per_token=9 of num_experts=8"),
        ({"log": {"experts": True}}, "log.experts: gpt has no experts; leave it out"),
        ({"plan": {"offload": ["expert"]}}, "plan.offload of expert: gpt has no experts; leave expert out"),
        ({"plan": {"ep": 2}}, "gpt has no experts; leave them out"),
        ({"plan": {"ep": 2, "expert_axes": ["mp"]}}, "name ep there too"),
        ({"plan": {"expert_dispatch": "padded"}}, "experts are not split; set ep too"),
        ({"plan": {"mp": 2, "overlap": {"mp": "ring"}}}, "mp=2, sequence_parallel=False: sums over mp .* set both"),
        ({"plan": {"overlap": {"moe": 2}}}, "nothing is sent to experts; set ep too"),
        ({"plan": {"expert_all_to_all": "flat"}}, "expert_all_to_all=flat .* experts are not split; set ep too"),
        ({"model": {"family": "mixtral"}, "plan": {"ep": 3}}, "num_experts=8 is not a multiple of .*expert_axes"),
    ],
)
def test_experts_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PretrainConfig.model_validate(settings)


def test_make_train_is_over_four_dimensions():
    recipe = (ROOT / "Makefile").read_text()
    (name,) = re.findall(r"polyreme pretrain (\S+)", recipe)
    config = load(ROOT / name).config
    plan = config.plan
    assert (plan.dp, plan.pp, plan.sharding, plan.mp, plan.sharding_stage) == (2, 2, 2, 2, 3)
    assert f"CPU_NUM={plan.num_devices} " in recipe
    assert estimate.run_flops_per_token(config) * config.tokens_per_step * config.train.steps < 2e12  # a minute's
