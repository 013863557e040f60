"""Rows of published runs: how cells are read, what defaults are told, how far predictions are from measurements."""

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyreme.cli.main import app
from polyreme.errors import ConfigError
from polyreme.mesh import ANY
from polyreme.planner.conventions import measured_seconds
from polyreme.planner.published import columns_not_read, run_of
from polyreme.planner.published_file import answer, read_rows

ROWS = Path(__file__).parents[2] / "benchmarks" / "published_runs.csv"
ROW = {
    "id": "r1",
    "system": "Megatron-LM",
    "date": "2022-05",
    "model": "gpt3-175B",
    "h": 12288,
    "layers": 96,
    "heads": 96,
    "ffn": 49152,
    "vocab": 51200,
    "seq": 2048,
    "gated_mlp": 0,
    "hardware": "A100-80G",
    "n_dev": 64,
    "dp": 1,
    "zero_or_fsdp": 0,
    "tp": 8,
    "sp": "yes",
    "pp": 8,
    "vpp": 3,
    "mbs": 1,
    "gbs": 64,
    "recompute": "selective(attention)",
    "dtype": "fp16",
}


@pytest.fixture(scope="module")
def errors():
    """Relative error of every row of the sample, by device kind."""
    errors_by_kind = {}
    for row in read_rows(ROWS):
        run = run_of(row)
        measured = measured_seconds(row, run.model, run.batch, run.cluster.num_devices)
        errors_by_kind.setdefault(row["hardware"], []).append(run.predict().step_seconds / measured - 1)
    return errors_by_kind


def test_the_median_error_over_the_sample_is_at_most_a_tenth(errors):
    sizes = [abs(error) for each in errors.values() for error in each]
    assert len(sizes) == 64
    assert statistics.median(sizes) <= 0.10
    assert sorted(sizes)[int(0.9 * len(sizes))] <= 0.25


def test_no_device_kind_is_far_off(errors):
    """One set of curves a kind: no kind's rows may pay for another's."""
    for kind, each in errors.items():
        assert statistics.median(map(abs, each)) <= 0.15, kind


def test_a_row_becomes_a_plan():
    run = run_of(ROW)
    plan = run.plan
    assert (plan.mesh.degrees["pp"], plan.mesh.mp, plan.schedule, plan.virtual_stages) == (8, 8, "VPP", 3)
    assert plan.mesh.strides["mp"] == 1  # tensor parallelism inside a node
    assert (plan.recompute, plan.num_microbatches, run.batch) == ("core_attn", 64, 64)
    assert plan.strategy.rule("act")["seq"] == ("mp",)
    assert run.model.graph().num_parameters == pytest.approx(175e9, rel=0.01)
    training = run.training
    assert (training.dtype, training.attention, training.gradients, training.cut) == ("float16", "plain", 2, "layers")
    assert set(run.assumed) == {"attention", "overlap"}  # nothing else was left open


def test_years_tell_what_software_did():
    new = run_of({**ROW, "date": "2024-07", "dtype": "bf16", "notes": "tp-comm-overlap"}).training
    assert (new.attention, new.overlap, new.gradients) == ("fused", ("dp", "sharding", "mp_grad", "mp"), 4)
    old = run_of({**ROW, "date": "2021-04"}).training
    assert (old.attention, old.overlap, old.prunes, old.fusion) == ("plain", (), False, "layers")
    tpu = run_of({**ROW, "system": "MaxText", "hardware": "TPUv5p", "dtype": "bf16"}).training
    assert (tpu.prunes, tpu.fusion, "mp" in tpu.overlap, "dp" in tpu.overlap) == (True, "all", True, False)
    assert run_of({**ROW, "system": "PaddleNLP"}).training.fusion == "none"
    eight = run_of({**ROW, "hardware": "H100-80G", "dtype": "fp8"}).training
    assert (eight.dtype, eight.products) == ("bfloat16", "float8")
    assert run_of({**ROW, "dtype": "fp8"}).training.products == ""  # an A100 has none


@pytest.mark.parametrize(
    ("row", "beside", "is_tuned"),
    [
        ({"system": "NeMo"}, ("dp", "sharding", "mp_grad", "mp"), True),
        ({"system": "NeMo", "date": "2024-03"}, ("dp", "sharding", "mp_grad"), False),
        ({"system": "NeMo AutoModel"}, ("dp", "sharding", "mp_grad"), False),
        ({"system": "Megatron-LM"}, ("mp_grad",), False),
        ({"system": "Megatron-LM", "notes": "overlap-grad-reduce"}, ("dp", "sharding", "mp_grad"), False),
        ({"system": "MaxText"}, ("mp_grad",), False),
        ({"system": "MaxText", "notes": "latency hiding scheduler"}, ("dp", "sharding", "mp_grad"), False),
        ({"system": "MaxText", "hardware": "TPUv4"}, ("sharding", "mp_grad", "mp"), False),
        ({"system": "PyTorch FSDP"}, ("dp", "sharding", "mp_grad"), False),
        ({"system": "PyTorch FSDP", "notes": "no overlap"}, ("mp_grad",), False),
        ({"system": "DeepSpeed", "zero_or_fsdp": "zero2"}, ("mp_grad",), False),
        ({"system": "DeepSpeed", "zero_or_fsdp": "zero3"}, ("dp", "sharding", "mp_grad"), False),
    ],
)
def test_a_framework_tells_what_runs_beside_arithmetic(row, beside, is_tuned):
    training = run_of(ROW | {"hardware": "H100-80G", "date": "2024-09", "dtype": "bf16"} | row).training
    assert (training.overlap, training.tuned) == (beside, is_tuned)


@pytest.mark.parametrize(
    ("row", "attention"),
    [
        ({"system": "EasyLM (jax)"}, "plain"),  # jax had no kernel of its own yet
        ({"system": "EasyLM (jax)", "notes": "splash attention"}, "fused"),
        ({"system": "EasyLM (jax)", "date": "2024-06"}, "fused"),
        ({"system": "PyTorch"}, "fused"),
        ({"system": "PyTorch", "notes": "no flash attention"}, "plain"),
    ],
)
def test_attention_is_fused_from_when_a_framework_had_a_kernel_for_it(row, attention):
    assert run_of(ROW | {"date": "2023-06", "dtype": "bf16"} | row).training.attention == attention


def test_plain_attention_by_elementary_kernels_takes_longer_than_by_one():
    one = ROW | {"n_dev": 1, "tp": 1, "pp": 1, "sp": "no", "gbs": 1, "layers": 2, "recompute": "none"}
    fused, elementary = (run_of(one | {"system": system}).seconds() for system in ("Megatron-LM", "PyTorch"))
    assert elementary > 1.05 * fused


def test_machines_of_other_sizes_than_the_kinds_usual_ones():
    eight, four = run_of(ROW).cluster, run_of(ROW | {"notes": "4 GPUs a node; 4 x 100 Gbit/s a node"}).cluster
    assert (eight.links[0].devices, four.links[0].devices) == (8, 4)
    assert four.links[1].bandwidth == 100e9 / 8  # a card each


def test_tuned_products_are_those_of_16_bits():
    """Of one device, whose step is products: as much faster as the data sheet says, those of 8 bits hardly at all."""
    one = {"n_dev": 1, "tp": 1, "pp": 1, "sp": "no", "gbs": 1, "layers": 2, "hardware": "H100-80G", "date": "2024-09"}

    def gain(dtype):
        run = run_of(ROW | one | {"dtype": dtype, "system": "NeMo"})
        assert run.training.tuned
        return replace(run, training=replace(run.training, tuned=False)).seconds() / run.seconds()

    assert 1.08 < gain("bf16") < 1.18
    assert 1 <= gain("fp8") < gain("bf16") / 1.04


SPARSE = {"experts": 128, "topk": 8, "moe_ffn": 768, "h": 2048, "layers": 4, "heads": 32, "kv_heads": 4, "vocab": 32000}
"""Of a model whose experts are small."""


def test_products_of_experts_are_called_one_by_one():
    """By Transformer Engine: sixteen small experts of a device cost what calling them takes, by XLA a product."""
    one = {"n_dev": 8, "tp": 1, "pp": 1, "sp": "no", "dp": 8, "ep": 8, "gbs": 8, "hardware": "B200", "dtype": "fp8"}
    row = ROW | SPARSE | one | {"gated_mlp": 1, "date": "2025-11", "vpp": 1, "recompute": "none", "seq": 4096}
    called, whole = (run_of(row | {"system": name, "mbs": 1}) for name in ("NeMo", "MaxText"))
    calls = 4 * 16 * 3 * 9  # layers, experts, products, three calls in each of three passes
    assert called.training.each_expert * calls < called.seconds() - whole.seconds()
    assert whole.training.each_expert == 0
    # many rows of each take longer than the calls
    many = [replace(called, training=replace(called.training, each_expert=e), batch=256).seconds() for e in (0, 1.2e-5)]
    assert many[0] == pytest.approx(many[1], rel=0.02)


def test_deepspeeds_engine_waits_for_its_host():
    row = ROW | {"n_dev": 8, "dp": 1, "tp": 8, "pp": 1, "vpp": 1, "layers": 4}
    plain, engine = (run_of(row | {"system": "Megatron-LM", "notes": words}) for words in ("", "DeepSpeed"))
    times = [run.predict().times for run in (plain, engine)]
    assert times[1].compute == pytest.approx(1.25 * times[0].compute)
    assert times[1].exposed["mp"] == pytest.approx(times[0].exposed["mp"], rel=0.3)


def test_a_torchtitan_pipeline_has_as_many_microbatches_as_devices():
    row = ROW | {"system": "TorchTitan", "date": "2024-12", "mbs": "", "vpp": 1, "dp": 1, "dtype": "bf16"}
    assert run_of(row).plan.num_microbatches == 8
    assert run_of(row | {"mbs": 4}).plan.num_microbatches == 16


def test_weights_in_16_bits_alone_have_a_third_of_the_state():
    row = ROW | {"n_dev": 8, "dp": 1, "tp": 8, "pp": 1, "vpp": 1, "layers": 4, "date": "2025-01", "dtype": "bf16"}
    narrow, wide = (run_of(row | {"system": name}).predict() for name in ("NeMo AutoModel", "NeMo"))
    assert narrow.memory.optimizer == pytest.approx(wide.memory.optimizer / 3)
    assert narrow.memory.parameters == wide.memory.parameters
    assert narrow.times.optimizer < 0.6 * wide.times.optimizer


def test_packed_rows_attend_within_documents():
    long = {"system": "Megatron-LM", "date": "2024-01", "seq": 4096}
    assert run_of(ROW | long | {"notes": "inputs packed to 4096"}).model.document == 512
    assert run_of(ROW | long).model.document == 0
    assert run_of(ROW | long | {"system": "NeMo", "notes": "LoRA"}).model.document == 512
    packed, whole = (run_of(ROW | long | {"notes": words}).seconds() for words in ("packed", ""))
    assert packed < whole


def test_frozen_weights_have_no_gradients_in_mfu():
    tuned = {"system": "NeMo", "date": "2025-01", "hardware": "H100-80G", "dtype": "bf16", "notes": "LoRA"}
    run = run_of(ROW | tuned)
    found = run.predict()
    rate = run.model.graph().flops_per_sample * run.batch / found.step_seconds
    assert found.mfu == pytest.approx(2 * rate / (64 * run.cluster.device.flops["bfloat16"]))


def test_state_lies_on_expert_parallel_ranks_too():
    """Of all but experts; what ZeRO 3 shards besides does not."""
    sparse = {"experts": 8, "topk": 2, "tp": 1, "pp": 1, "sp": "no", "n_dev": 16, "dp": "", "ep": 8, "gbs": 64}
    strategies = [run_of(ROW | sparse | {"zero_or_fsdp": zero}).plan.strategy for zero in ("zero1", "fsdp")]
    assert [each.rule("state")[ANY] for each in strategies] == [("sharding", "ep")] * 2
    assert strategies[1].rule("param")[ANY] == ("sharding",)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"zero_or_fsdp": "2(deg4)", "dp": 1}, {"dp": 1, "sharding": 4, "stage": 2}),
        ({"zero_or_fsdp": "1?", "dp": "4"}, {"dp": 1, "sharding": 4, "stage": 1}),
        ({"zero_or_fsdp": "fsdp2", "dp": 2}, {"dp": 2, "sharding": 2, "stage": 3}),
        ({"zero_or_fsdp": "0", "dp": "?"}, {"dp": 4, "sharding": 1, "stage": None}),
        ({"zero_or_fsdp": "fsdp", "dp": ""}, {"dp": 1, "sharding": 4, "stage": 3}),
        ({"zero_or_fsdp": "dist-opt", "dp": 4}, {"dp": 1, "sharding": 4, "stage": 1}),
    ],
)
def test_ways_to_write_sharding(changes, expected):
    run = run_of(
        {**ROW, "n_dev": 8, "pp": 1, "vpp": 1, "tp": 2, "h": 1024, "ffn": 4096, "layers": 4, "heads": 8, **changes}
    )
    mesh, rules = run.plan.mesh, run.plan.strategy
    assert (mesh.dp, mesh.sharding, mesh.mp) == (expected["dp"], expected["sharding"], 2)
    found = [stage for stage, kind in ((3, "param"), (2, "grad"), (1, "state")) if rules.rule(kind).get(ANY)]
    assert (found[0] if found else None) == expected["stage"]


def test_experts_live_on_data_parallel_ranks_or_have_devices_of_their_own():
    moe = {**ROW, "n_dev": 8, "pp": 1, "tp": 1, "h": 512, "layers": 2, "heads": 8, "experts": 8, "topk": 2, "ep": 4}
    inside = run_of({**moe, "dp": 8}).plan.mesh
    assert (inside.dp, inside.ep) == (2, 4)
    apart = run_of({**moe, "dp": 2}).plan.mesh
    assert (apart.dp, apart.ep) == (2, 4)


def test_experts_take_tensor_parallel_devices_too_or_it_is_told():
    moe = {**ROW, "n_dev": 32, "pp": 2, "tp": 2, "h": 512, "layers": 4, "heads": 8, "experts": 32, "topk": 2, "vpp": 1}
    folded = run_of({**moe, "ep": 16, "dp": 8}).plan
    assert (folded.mesh.ep, folded.mesh.mp, folded.expert_axes) == (8, 2, ("mp", "ep"))
    lost = run_of({**moe, "ep": 6, "dp": 8})
    assert lost.plan.mesh.ep == 2
    assert any("ep 6" in line for line in lost.not_understood)


def test_models_that_names_tell_of():
    row = {**ROW, "model": "DeepSeek-V3", "h": 7168, "layers": 61, "heads": 128, "ffn": "", "vocab": 129280}
    row |= {"experts": 256, "topk": 8, "moe_ffn": 2048, "gated_mlp": 1, "dp": "", "gbs": "", "date": "2024-12"}
    run = run_of({**row, "pp": 16, "vpp": 1, "tp": 1, "n_dev": 2048, "ep": 64})
    assert run.model.num_parameters == pytest.approx(671e9, rel=0.01)
    assert run.model.num_active_parameters == pytest.approx(37.5e9, rel=0.02)
    assert "arXiv:2412.19437" in run.assumed["model"]
    assert run.model.expert_reach == 0.5  # 4 of 8 machines
    assert run.training.cut == "balanced"  # 61 layers over 16 stages
    assert run_of({**ROW, "notes": "MTP 1"}).model.ahead == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"n_dev": 24, "tp": 3, "pp": 1, "heads": 16, "h": 1024}, "tp 3: does not divide the 16 heads"),
        ({"n_dev": 24, "tp": 1, "pp": 1, "experts": 8, "ep": 3}, "ep 3: does not divide the 8 experts"),
        ({"n_dev": 64, "tp": 8, "pp": 1, "dp": 4}, "dp '4': taken as 8"),
        ({"n_dev": 8, "tp": 1, "pp": 1, "dp": 8, "gbs": 61, "mbs": 1}, "gbs '61': taken as 64"),
        ({"n_dev": 8, "tp": 1, "pp": 8, "dp": 1, "layers": 16, "vpp": 4}, "vpp '4': taken as 2"),
        ({"hardware": "A100", "dtype": "fp8"}, "dtype 'fp8': the device has no such products, bfloat16 is taken"),
        ({"dtype": "int5"}, "dtype 'int5': taken as bfloat16"),
        ({"recompute": "full, 12 layers"}, "of how many layers is not told"),
        ({"notes": "host offload of moments"}, "'host offload': nothing is offloaded"),
        (
            {"hardware": "v5e", "n_dev": 15, "tp": 1, "pp": 1, "dp": 15, "gbs": 15},
            "n_dev '15': taken as 15 slices of 1",
        ),
    ],
)
def test_a_cell_that_is_taken_otherwise_is_told(changes, line):
    lines = run_of({**ROW, "dp": "", "vpp": "", "mbs": "", **changes}).not_understood
    assert any(line in each for each in lines), lines


def test_what_is_not_followed_is_told_and_strict_fails(tmp_path):
    said = {
        "LoRA": lambda run: run.training.trains == "adapters",
        "no compile": lambda run: run.training.fusion == "none",
        "torch.compile": lambda run: run.training.fusion == "layers",
        "fused norms and rotations (liger)": lambda run: run.training.fusion == "layers",
        "DualPipe": lambda run: "ep" in run.training.overlap,
    }
    for words, holds in said.items():
        assert holds(run_of({**ROW, "system": "PyTorch", "notes": words})), words
    assert run_of(ROW).not_understood == ()
    for changes, words in (
        ({"notes": "sliding window 128"}, "sliding window"),
        ({"system": "Unheard"}, "Unheard"),
        ({"recompute": "some of it"}, "some of it"),
        ({"dtype": "nvfp4"}, "8 bits are taken"),
    ):
        path = tmp_path / "row.json"
        path.write_text(json.dumps([{**ROW, **changes}]))
        loose, strict = (
            CliRunner().invoke(app, ["plan", "--predict", str(path), "--json", *more]) for more in ((), ("--strict",))
        )
        assert words in loose.stderr
        assert any(words in line for line in json.loads(loose.stdout)[0]["not_understood"])
        assert loose.exit_code == 0
        assert isinstance(strict.exception, ConfigError)


def test_what_recompute_says():
    def told(text, **more):
        run = run_of({**ROW, "recompute": text, **more})
        return run.plan.recompute, run.plan.recompute_share, run.training.cheap

    assert told("selective layer") == ("full", 0.5, False)
    assert told("selective op") == ("full", 0.5, True)
    assert told("48 of 96 layers") == ("full", 0.5, False)
    assert told("RMSNorm, MLA up-projections") == ("none", 1.0, True)  # no "no" in norm
    assert told("minimal") == ("core_attn", 1.0, True)


def test_a_context_parallel_group_shards_what_it_repeats():
    row = {**ROW, "n_dev": 8, "pp": 1, "vpp": 1, "tp": 1, "cp": 8, "h": 1024, "ffn": 4096, "layers": 4, "heads": 8}
    whole, split = (run_of({**row, "zero_or_fsdp": text}).predict().memory for text in ("0", "fsdp1"))
    assert whole.parameters == pytest.approx(8 * split.parameters, rel=0.01)


def test_what_is_open_is_chosen_and_told():
    run = run_of({**ROW, "mbs": "?", "vpp": "interleaved", "recompute": "?", "vocab": "", "gbs": ""})
    assert {"mbs", "vpp", "recompute", "vocab", "gbs", "attention", "overlap"} <= set(run.assumed)
    assert run.predict().fits
    doubtful = run_of({**ROW, "mbs": "1?"})
    assert "mbs" not in doubtful.assumed
    sized = run_of({**ROW, "h": "", "layers": "?", "heads": "", "params_b": 175})
    assert sized.assumed["layers"] == 96
    assert sized.model.num_parameters == pytest.approx(175e9, rel=0.1)
    odd = run_of({**ROW, "gbs": 100, "mbs": 3})
    assert odd.assumed["gbs"] == odd.batch == 99


def test_tpu_slices_and_batches_for_each_device():
    row = {**ROW, "system": "MaxText", "hardware": "TPUv5p", "n_dev": 128, "tp": 4, "pp": 1, "vpp": 1, "dp": 2}
    run = run_of({**row, "zero_or_fsdp": "fsdp16", "mbs": 6, "gbs": 768, "notes": "2x v5p-128 (cores)"})
    assert run.cluster.links[0].torus == (4, 4, 4)
    assert run.plan.num_microbatches == 1
    assert run.plan.rows_per_device(run.batch) == 24
    many = run_of({**row, "hardware": "TPUv5e", "n_dev": 512, "zero_or_fsdp": "fsdp64"})
    assert many.cluster.links[0].devices == 256


def test_a_kind_that_is_not_known_takes_the_rows_figures():
    run = run_of({**ROW, "hardware": "SN40L", "peak_bf16_tflops": 638, "hbm_gb": 64})
    assert run.cluster.device.flops["bfloat16"] == pytest.approx(638e12)
    assert any("SN40L" in line for line in run.not_understood)
    assert "SN40L" in str(run.assumed["hardware"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_dev": "?"}, "row r1: column 'n_dev' is '\\?'; give a number"),
        ({"layers": "many"}, "row r1: column 'layers' has 'many'; give a number, or \\? if not known"),
        ({"n_dev": 60}, "tp 8 x pp 8 x cp 1 = 64 does not divide n_dev 60"),
        ({"hardware": "SN40L"}, "unknown device kind 'SN40L'"),
        ({"n_dev": "8x8"}, "row r1: column 'n_dev' has '8x8'; give a number"),
        ({"seq": "4k"}, "column 'seq' has '4k'; give a number"),
        ({"kv_heads": "1-2"}, "column 'kv_heads' has '1-2'; give a number"),
        ({"pp": "1e-3"}, "column 'pp' has '1e-3'; give a number"),
        ({"heads": 3.7}, "column 'heads' has '3.7'; give a whole number"),
        ({"h": "1e400"}, "column 'h' has '1e400'; give a number of at most 1e\\+09"),
        ({"hardware": "?"}, "row r1: column 'hardware' is not known; name a kind"),
        ({"h": "?"}, "columns 'h' and 'layers' are '' and '96'; give numbers, or params_b"),
    ],
)
def test_refuses_what_it_cannot_do(changes, message):
    with pytest.raises(ConfigError, match=message):
        run_of({**ROW, **changes})


def test_numbers_may_have_words_after_them():
    run = run_of({**ROW, "gbs": "64 (estimated)", "vocab": "51,200", "seq": "2048?"})
    assert (run.batch, run.model.vocab, run.model.seq) == (64, 51200, 2048)
    odd = run_of({**ROW, "hardware": "SN40L", "peak_bf16_tflops": 638.5, "hbm_gb": "?"})
    assert odd.cluster.device.flops["bfloat16"] == pytest.approx(638.5e12)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("float16", "float16"),
        ("fp32 (no AMP)", "float32"),
        ("bf16, fp32 gradients", "bfloat16"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_ways_to_write_a_dtype(text, dtype):
    assert run_of({**ROW, "dtype": text}).training.dtype == dtype


def test_words_that_are_not_known_are_told():
    assert run_of({**ROW, "recompute": "no activation checkpointing"}).plan.recompute == "none"
    assert run_of({**ROW, "gated_mlp": "SwiGLU"}).model.gated
    told = run_of({**ROW, "dtype": "int4", "sp": "maybe", "zero_or_fsdp": "abc"}).assumed
    assert (told["dtype"], told["sp"]) == ("bfloat16", "no, as 'maybe' is not known")
    assert told["zero_or_fsdp"] == "stage 3, as 'abc' is not known"
    left_open = run_of({**ROW, "mbs": "1-2", "vpp": "interleaved"}).assumed
    assert re.fullmatch(r"\d+, as '1-2' is not known", left_open["mbs"])
    assert re.fullmatch(r"\d+, as 'interleaved' is not known", left_open["vpp"])


def test_columns_that_are_not_read_are_told(tmp_path):
    told = ("'layer'; did you mean 'layers'?", "'remark'")
    assert columns_not_read({**ROW, "layer": 8, "remark": "a"}) == told
    (tmp_path / "rows.json").write_text(json.dumps([{**ROW, "layer": 8, "remark": "a"}] * 2))
    shown = CliRunner().invoke(app, ["plan", "--predict", str(tmp_path / "rows.json"), "--json"])
    assert [line.partition("not read: column ")[2] for line in shown.stderr.splitlines()] == list(told)
    assert json.loads(shown.stdout)[1]["step_seconds"] == answer(ROW)["step_seconds"]
    assert json.loads(shown.stdout)[1]["not_read"] == list(told)
    no_run = answer({"layer": 8})
    assert set(no_run) == {"not_read", "error"}
    assert no_run["not_read"] == told[:1]


def test_what_notes_tell_of_hardware_and_kernels():
    run = run_of({**ROW, "notes": "4 x 100 Gbit/s RoCE a node; no flash attention", "date": "2024"})
    assert run.cluster.links[-1].bandwidth == pytest.approx(4 * 100e9 / 8 / 8)
    assert run.training.attention == "plain"
    assert run_of({**ROW, "notes": "400 Gb/s InfiniBand per GPU"}).cluster.links[-1].bandwidth == pytest.approx(50e9)
    # room for a quarter more rows than come: all of it is computed
    experts = {**ROW, "experts": 8, "topk": 2, "moe_ffn": 4096}
    dropless, dropped = (run_of({**experts, "notes": notes}) for notes in ("", "capacity factor 1.25"))
    assert (dropless.model.tokens_per_expert, dropped.model.tokens_per_expert) == (0, 2048 * 2 // 8 * 5 // 4)
    assert not dropped.not_understood
    low = run_of({**ROW, "hardware": "GB300", "dtype": "nvfp4", "date": "2026"})
    assert (low.training.products, low.not_understood) == ("float4", ())


def test_layers_that_do_not_divide_take_embedding_and_head_along():
    """126 layers over 16 stages of 8 chunks: a layer each but for the first and the last."""
    run = run_of({**ROW, "layers": 126, "pp": 16, "vpp": 8, "tp": 4, "n_dev": 64, "gbs": 64})
    assert (run.training.cut, run.plan.virtual_stages) == ("items", 8)
    assert run_of({**ROW, "layers": 94}).training.cut == "items"
    assert run_of({**ROW, "layers": 97}).training.cut == "balanced"


def test_what_is_offloaded_is_not_on_the_device():
    row = {**ROW, "hardware": "TPUv6e", "tp": 1, "pp": 1, "vpp": 1, "zero_or_fsdp": "fsdp64", "dtype": "bf16"}
    near, far = (run_of({**row, "system": "MaxText", "recompute": kept}) for kept in ("full", "custom, q offloaded"))
    assert far.predict().memory.activations < near.predict().memory.activations / 10


def test_a_dtype_that_the_kind_has_no_units_for_is_told():
    run = run_of({**ROW, "dtype": "bf16", "hardware": "V100-32G", "peak_bf16_tflops": "", "hbm_gb": ""})
    assert (run.training.dtype, run.assumed["dtype"]) == ("float16", "float16")


def test_files_of_rows(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([ROW]))
    (tmp_path / "b.yaml").write_text("".join(f"{key}: {value}\n" for key, value in ROW.items()))
    (tmp_path / "c.csv").write_text(f"{','.join(ROW)}\n{','.join(map(str, ROW.values()))}\n")
    steps = {answer(read_rows(tmp_path / name)[0])["step_seconds"] for name in ("a.json", "b.yaml", "c.csv")}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "x", "rows come as .csv, .yaml, .yml or .json"),
        ("a.json", "{", "is not valid json"),
        ("a.yaml", "a: [", "is not valid yaml"),
        ("a.csv", "id,h\n", "has no rows"),
        ("a.csv", "id\n1,2\n", "line 2 has more cells than the header"),
        ("a.json", "[1]", "has no rows"),
        ("a.json", "[" * 100_000, "is not valid json"),
        ("a.csv", "id,h,h\n1,2,3\n", "the header has column 'h' twice"),
        ("a.csv", 'id,h\n"1\n2",3\n\n4,5,6\n', "line 5 has more cells than the header"),
    ],
)
def test_files_that_have_no_rows(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path / name)


def test_names_of_any_kind_are_shown(tmp_path):
    path = tmp_path / "rows.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**ROW, "id": "2024-01-15", "model": 7}.items()))
    assert (
        json.loads(CliRunner().invoke(app, ["plan", "--predict", str(path), "--json"]).stdout)[0]["id"] == "2024-01-15"
    )
    assert "2024-01-15 7" in CliRunner().invoke(app, ["plan", "--predict", str(path)]).stdout


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_plan_predict_prints_rows_as_json(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW]))
    result = CliRunner().invoke(app, ["plan", "--predict", str(path), "--json"])
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)
    assert row["step_seconds"] == pytest.approx(13.75, rel=0.15)  # arXiv:2205.05198, table 5
    tokens = 64 * 2048 / 64 / row["step_seconds"]
    assert row["tokens_per_second_per_device"] == pytest.approx(tokens)
    assert row["mfu"] == pytest.approx(row["tflops_per_device"] / 312)
    parts = ("parameters", "gradients", "optimizer", "activations", "workspace")
    assert math.isclose(sum(row["memory"][name] for name in parts), row["memory"]["total"])
    text = CliRunner().invoke(app, ["plan", "--predict", str(path)])
    assert "gpt3-175B" in text.stdout
    path.write_text(json.dumps([ROW, {**ROW, "id": "bad", "n_dev": 7}]))
    mixed = CliRunner().invoke(app, ["plan", "--predict", str(path), "--json"])
    assert "does not divide n_dev 7" in json.loads(mixed.stdout)[1]["error"]
    assert isinstance(mixed.exception, ConfigError)
    assert "1 of 2 rows describe no run" in str(mixed.exception)
