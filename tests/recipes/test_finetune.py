"""Fine-tuning runs: the same on every plan, only what trains saved, resumed exactly, read back, refused by name."""

import json
import signal

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from polyreme.core import rng
from polyreme.distributed.checkpoint import CheckpointStore
from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, DataError
from polyreme.generation import SamplingParams
from polyreme.generation.tokenizer import AutoTokenizer
from polyreme.models import AutoModelForCausalLM
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from polyreme.models.files import adapters
from polyreme.nn import LoRA
from polyreme.recipes.data.batches import Numbered, gather
from polyreme.recipes.inference import chat
from polyreme.recipes.training.trainer import Trainer
from polyreme.recipes.weights.base import load_base, load_trained
from polyreme.recipes.weights.merge import merge
from polyreme.recipes.weights.trained import load_writer
from polyreme.recipes.weights.tuning import tune
from tests.recipes.tiny_run import ONE_DEVICE, finish, history, saved, start_command
from tests.recipes.tiny_tune import load, train, write_base

# float32 sums of up to 512 terms taken in another order, over three steps
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "llama")


def three_steps(folder, base, *overrides, devices):
    """[(loss, gradient norm), ...] of three steps on the run's own samples, and its trained parameters after them."""
    loaded = load(folder / "run", base, "data.validation_fraction=0.1", *overrides)
    trainer, data = (
        Trainer(loaded.config, jax.devices()[:devices]),
        Numbered(loaded.config.samples.load.load()(loaded.config, loaded.folder).train),
    )
    results = []
    for step in range(3):
        batch = gather(data, range(4 * step, 4 * step + 4))
        counts = [(labels != -100).sum() for labels in batch.labels]
        assert len({*counts}) > 1  # or any weighing would do
        result = trainer.step(batch.inputs, batch.labels)
        results.append((float(result.loss), float(result.grad_norm)))
    trained = {name: p.numpy() for name, p in trainer.model.named_parameters() if p.trainable}
    clear_plan()
    return results, trained


SHARDED = ("plan.dp=1", "train.accumulation=2")
STAGED = ("plan.dp=1", "plan.sharding=1", "plan.sharding_stage=0", "plan.pp=2", "train.accumulation=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        pytest.param(["pissa_init=true", "packing=false"], [*STAGED, "plan.recompute=full"], id="stages"),
        pytest.param(["use_dora=true"], SHARDED, id="dora", marks=pytest.mark.slow),
        pytest.param(["weight_quantize_algo=nf4"], SHARDED, id="qlora", marks=pytest.mark.slow),
        pytest.param(["lora_dropout=0"], STAGED, id="packed_stages", marks=pytest.mark.slow),
        pytest.param(["fine_tuning=full", "lora_rank=8", "qat=wint4"], SHARDED, id="qat", marks=pytest.mark.slow),
        pytest.param(
            ["fine_tuning=freeze", "lora_rank=8", "freeze_trainable_layers=1"],
            SHARDED,
            id="freeze",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["fine_tuning=full", "lora_rank=8"], [*SHARDED, "plan.recompute=full"], id="full", marks=pytest.mark.slow
        ),
    ],
)
def test_a_plan_and_any_accumulation_train_as_one_device(tmp_path, base, settings, plan):
    steps, trained = three_steps(tmp_path, base, *settings, *plan, devices=4)
    expected, alone = three_steps(tmp_path, base, *settings, *ONE_DEVICE, devices=1)
    np.testing.assert_allclose(steps, expected, rtol=CLOSE)
    assert trained.keys() == alone.keys()
    for name, values in alone.items():
        # Adam divides by the root of squares: near zero an update of 1e-2 may be off by more than its rounding
        np.testing.assert_allclose(trained[name], values, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_adapters_of_experts_train_over_devices_as_on_one(tmp_path):
    base = write_base(tmp_path / "mixtral", Mixtral, MixtralConfig, num_experts=4, balance_loss=0.0)
    plan = ["plan.dp=1", "plan.ep=2", "plan.mp=1"]
    steps, trained = three_steps(tmp_path, base, "use_dora=true", *plan, devices=4)
    expected, alone = three_steps(tmp_path, base, "use_dora=true", *ONE_DEVICE, devices=1)
    assert sum(".ffn.changes." in name for name in trained) == 2 * 3 * 3  # blocks, matrices, A and B and lengths
    np.testing.assert_allclose(steps, expected, rtol=CLOSE)
    for name, values in alone.items():
        np.testing.assert_allclose(trained[name], values, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def run(tmp_path_factory, base):
    """A finished run over 2 x 2 x 2 devices, of adapters."""
    folder = tmp_path_factory.mktemp("run") / "lora"
    train(folder, base, "loraplus_lr_ratio=2", "neftune_noise_alpha=1", "log.sample_tokens=4", "log.prompt=God")
    clear_plan()
    return folder


@pytest.mark.slow
def test_only_what_trains_is_saved_and_is_read_back(run, base):
    arrays, meta = saved(run)
    model, tokenizer = load_trained(run)[0], load_writer(run)[1]
    trained = {name for name, p in model.named_parameters() if p.trainable}
    assert {name for name in arrays if name.startswith("model/")} == {f"model/{name}" for name in trained}
    assert len(trained) == 2 * len(adapters.adapters_of(model))
    slots = [name for name in arrays if name.startswith("optimizer/moment1/")]
    assert len(slots) == len(trained)
    assert meta["host"]["base_digest"] == adapters.open_adapter(run / "adapter").digest

    # the folder for peft is the run
    ids, other = to_tensor(np.arange(16).reshape(2, 8)), AutoModelForCausalLM.from_pretrained(base)
    before = other(ids).numpy()
    adapters.apply_adapter(other, adapters.open_adapter(run / "adapter"))
    model.eval()
    np.testing.assert_array_equal(other(ids).numpy(), model(ids).numpy())
    assert np.abs(before - model(ids).numpy()).max() > 1e-3
    assert tokenizer.end
    assert json.loads((run / "generation_config.json").read_text())["eos_token_id"] == list(tokenizer.end)


@pytest.mark.slow
def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path, run, base):
    settings = ("loraplus_lr_ratio=2", "neftune_noise_alpha=1")
    folder = tmp_path / "again"
    # what it is made of is found by content: neither samples nor weights lie where they did
    train(folder, base, *settings, "checkpoint.keep=3")
    clear_plan()
    assert history(folder) == history(run)
    train(folder, base, *settings, resume="3")
    assert_same_state_of_adapters(folder, run)
    with pytest.raises(ConfigError, match="lora_rank was 4, is 2"):
        train(folder, base, *settings, "lora_rank=2")
    with pytest.raises(CheckpointError, match="put those weights back"):
        train(folder, write_other_base(tmp_path / "other"), *settings)


@pytest.mark.slow
def test_a_run_that_is_killed_or_finds_the_disk_full_goes_on_to_the_same_bits(tmp_path, run, base):
    settings = ("loraplus_lr_ratio=2", "neftune_noise_alpha=1", "checkpoint.async_save=false")
    loaded = load(tmp_path / "again", base, *settings)
    command = ["polyreme", "finetune", str(loaded.path), *loaded.overrides]
    _, err = finish(start_command(command, FAULTS="ckpt.write:raise=ENOSPC@1"), code=4)
    assert "make room, or keep fewer steps" in err
    assert not saved_steps(tmp_path / "again")
    finish(start_command(command, FAULTS="train.step:kill@5"), code=-signal.SIGKILL)
    assert saved_steps(tmp_path / "again") == [3]
    out, _ = finish(start_command(command))
    assert "resumed after step 3" in out
    assert history(tmp_path / "again") == history(run)
    assert_same_state_of_adapters(tmp_path / "again", run)
    assert (tmp_path / "again/adapter/adapter_model.safetensors").read_bytes() == (
        run / "adapter/adapter_model.safetensors"
    ).read_bytes()


def saved_steps(folder):
    with CheckpointStore(folder / "checkpoints", read_only=True) as store:
        return list(store.steps())


def write_other_base(folder):
    write_base(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.norm.weight.set_value(2 * model.norm.weight.numpy())
    model.save_pretrained(folder)
    return folder


def assert_same_state_of_adapters(one, other):
    (a, meta_a), (b, meta_b) = saved(one), saved(other)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name].view(np.uint8), b[name].view(np.uint8), err_msg=name)
    assert meta_a["data"] == meta_b["data"]


def test_merged_it_is_the_same_model_in_a_folder_of_published_weights(tmp_path, run, base):
    said = []
    merge(run, tmp_path / "merged", say=said.append)
    merge(run / "adapter", tmp_path / "of_adapter", say=said.append)
    assert "14 merged" in said[0]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "of_adapter"))
    assert one.keys() == other.keys() == load_file(base / "model.safetensors").keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
    ids, model = to_tensor(np.arange(16).reshape(2, 8)), load_trained(run)[0].eval()
    expected = model(ids).numpy()
    # two sums of up to 64 terms and a product of 4 for each of 14 maps, in another order
    atol = 14 * 2 * 68 * np.finfo(np.float32).eps * np.abs(expected).max()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(merged(ids).numpy(), expected, rtol=0, atol=atol)
    adapted, tokenizer = load_writer(base, adapter=run / "adapter")
    np.testing.assert_array_equal(adapted(ids).numpy(), load_writer(run)[0].eval()(ids).numpy())
    for name in ("merged", "of_adapter"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).end == tokenizer.end

    # as the base of another run it is a plain decoder, all of which would train
    again = load_base(str(run))
    assert all(p.trainable for p in again.parameters())
    assert not adapters.adapters_of(again)
    np.testing.assert_array_equal(again.eval()(ids).numpy(), adapted(ids).numpy())

    with pytest.raises(ConfigError, match="there is something already"):
        merge(run, tmp_path / "merged", say=said.append)
    with pytest.raises(CheckpointError, match="of digest"):
        merge(run / "adapter", tmp_path / "no", base=str(write_other_base(tmp_path / "other")), say=said.append)
    assert not (tmp_path / "no").exists()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["nf4", "experts"])
def test_adapters_of_weights_in_few_bits_and_of_experts_are_merged(tmp_path, kind):
    rng.seed(0)
    whole = Llama(LlamaConfig.nano(hidden_size=64)) if kind == "nf4" else Mixtral(MixtralConfig.nano())
    if kind == "nf4":
        adapters.quantize_maps(whole, "nf4")
    whole.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for layer in adapters.add_adapters(model, LoRA(rank=2)).values():
        layer.lora_b.set_value(np.full(layer.lora_b.shape, 0.1, np.float32))
    adapters.write_adapter(model, tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path / "base"), say=lambda text: None)
    ids, expected = to_tensor(np.arange(16).reshape(2, 8)), model.eval()(to_tensor(np.arange(16).reshape(2, 8))).numpy()
    assert np.abs(AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).numpy() - expected).max() > 1e-3
    # sums of up to 2 * 192 terms in another order, on the way through two blocks
    atol = 8 * 2 * 192 * np.finfo(np.float32).eps * np.abs(expected).max()
    for path, adapter in ((tmp_path / "merged", None), (tmp_path / "base", tmp_path / "adapter")):
        written = AutoModelForCausalLM.from_pretrained(path)
        if adapter is not None:
            adapters.apply_adapter(written, adapters.open_adapter(adapter))
        np.testing.assert_allclose(written(ids).numpy(), expected, rtol=0, atol=atol)


def test_a_conversation_ends_where_the_trained_token_says(tmp_path, base):
    """A model that was trained on one answer for long gives it, and stops."""
    folder = tmp_path / "run"
    chats = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "God"}, {"role": "assistant", "content": "heaven and earth"}]}
    chats.write_text("\n".join([json.dumps(row)] * 40), encoding="utf-8")
    train(folder, base, "train.steps=40", "train.learning_rate=3e-2", "lora_rank=8", "fine_tuning=full")
    clear_plan()
    said, lines = [], iter(["God", "/new", "", "God", "/exit", "never"])
    chat.run(folder, params=SamplingParams(temperature=0, max_tokens=30), ask=lambda: next(lines), say=said.append)
    assert "".join(said) == "heaven and earth\nheaven and earth\n"
    # a question that has no room is forgotten, and the conversation goes on
    said, lines = [], iter(["God " * 200, "God", "/exit"])
    chat.run(folder, params=SamplingParams(temperature=0, max_tokens=999), ask=lambda: next(lines), say=said.append)
    assert "positions for 96; begin anew with /new\nheaven and earth\n" in "".join(said)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora_r=4"], r"unknown key 'lora_r'; did you mean 'lora_rank'\?"),
        (["finetuning_type=full"], r"did you mean 'fine_tuning'\?"),
        (["train.num_train_epochs=3"], r"did you mean 'train.steps'\?"),
        (["fine_tuning=full"], "lora_rank=4 with fine_tuning=full, which has no use for it"),
        (["stage=dop"], "unknown stage 'dop'"),
        (["max_seq_len=97"], "has positions for 96 tokens; lower max_seq_len"),
        (["weight_quantize_algo=weight_only_int4", "pissa_init=true"], "would be of the rounded weight"),
        (["qat=wint4"], "qat=wint4 with fine_tuning=lora, which has no use for it"),
        (["fine_tuning=full", "lora_rank=8", "qat_group_size=8"], "qat_group_size=8 with qat=None"),
        (["use_dora=true", "pissa_init=true"], "leave one of them out"),
        (["plan.mp=8"], "num_heads=4 is not a multiple of plan.mp=8"),
        (["model=nowhere"], "nowhere: no such folder or file"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(tmp_path, base, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "run", base, *settings)


def test_rounding_in_training_refuses_weights_that_are_rounded_already(tmp_path, base):
    config = load(tmp_path / "run", base, "fine_tuning=full", "lora_rank=8", "qat=wint4").config
    model = load_base(base)
    adapters.quantize_maps(model, "int8")
    with pytest.raises(ConfigError, match=r"qat=wint4: blocks\.0\..* has weights of few bits already"):
        tune(model, config)


def test_rows_that_teach_nothing_are_refused_with_their_line(tmp_path, base):
    loaded = load(tmp_path / "run", base)
    assert loaded.config.dimensions.num_layers == 2
    chats = tmp_path / "chats.jsonl"
    rows = chats.read_text().splitlines()
    chats.write_text("\n".join([rows[0], '{"messages": [{"role": "user", "content": "God"}]}', *rows[1:]]))
    with pytest.raises(DataError, match=r"chats\.jsonl:2: messages\[0\]\.role"):
        loaded.config.samples.load.load()(loaded.config, loaded.folder)
    chats.write_text(rows[0])
    with pytest.raises(DataError, match=r"at least one of each.*a smaller batch, a shorter max_seq_len or packing=fa"):
        loaded.config.samples.load.load()(loaded.config, loaded.folder)
    # enough to train on, too few held out: what is asked of validation can be taken back
    chats.write_text("\n".join([rows[0]] * 9))
    few = ("train.global_batch=4", "data.validation_fraction=0.1")
    loaded = load(tmp_path / "run", base, *few, "log.validation_interval=5")
    with pytest.raises(DataError, match=r"validation_fraction: samples.*or log\.validation_interval=0 to do without\n"):
        loaded.config.samples.load.load()(loaded.config, loaded.folder)
    loaded = load(tmp_path / "run", base, *few, "log.validation_interval=0")
    assert len(loaded.config.samples.load.load()(loaded.config, loaded.folder).validation) > 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["lora_rank=4"], id="lora"),
        pytest.param(["weight_quantize_algo=nf4", "packing=false"], id="qlora"),
        pytest.param(["fine_tuning=full", "lora_rank=8", "train.accumulation=2"], id="full"),
    ],
)
@pytest.mark.slow
def test_blocks_that_are_compiled_once_train_as_one_program(tmp_path, base, settings, monkeypatch):
    whole, expected = three_steps(tmp_path, base, *settings, *ONE_DEVICE, devices=1)
    monkeypatch.setattr("polyreme.recipes.training.trainer._MANY_BLOCKS", 2)
    blocks, trained = three_steps(tmp_path, base, *settings, *ONE_DEVICE, devices=1)
    np.testing.assert_allclose(blocks, whole, rtol=CLOSE)
    for name, values in expected.items():
        np.testing.assert_allclose(trained[name], values, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("settings", [["lora_rank=4"], ["weight_quantize_algo=nf4"]], ids=["lora", "qlora"])
def test_alike_blocks_are_compiled_once_on_one_device(tmp_path, base, settings, monkeypatch):
    monkeypatch.setattr("polyreme.recipes.training.trainer._MANY_BLOCKS", 2)
    trainer = Trainer(load(tmp_path / "run", base, *settings, *ONE_DEVICE).config, jax.devices()[:1])
    assert trainer.logits is None  # the model lies whole here, and samples are written with its cache
    pipeline = trainer.planned.step.pipeline
    pipeline._share()  # as before each batch
    chunks = pipeline._first
    assert [chunk._like is not None for chunk in chunks] == [False, False, True]
