"""Memory of a plan: state by placement exactly, activations by hand, and what must hold for any plan."""

from dataclasses import replace
from typing import Any

import pytest

from polyreme.kernels import attention_blocked, grouped
from polyreme.kernels.linear import LARGE
from polyreme.kernels.linear_cross_entropy import CHUNK_BYTES, chunk_count
from polyreme.mesh import RECOMPUTE, SCHEDULES, Plan, make_schedule
from polyreme.planner import Memory, ModelShape, Training, memory_cpu
from polyreme.planner.frameworks import framework
from polyreme.planner.graph import beside_adapters
from polyreme.planner.memory import memory
from polyreme.planner.memory_cpu import OnProcessor
from polyreme.planner.memory_live import standings
from polyreme.planner.memory_stage import CHUNK, Held, Stage, chunks_of_tokens, total
from polyreme.planner.sharding import cuts_of, stage_pieces

GPT = ModelShape(hidden=64, layers=4, heads=4, seq=128, vocab=512, ffn=256)
LLAMA = replace(GPT, kv_heads=2, gated=True, biases=False, learned_positions=False, tied=False, rms_norm=True)
WIDE = Training(dtype="float32", master=False)
LOW = Training()
ALL: dict[str, Any] = {"trains": "adapters", "adapted": "all"}


def only(
    shape: ModelShape = GPT, batch: int = 8, training: Training = WIDE, compiler: Any = "accelerator", **plan: Any
) -> Memory:
    (found,) = memory(shape.graph(), Plan.from_degrees(**plan), batch, training, compiler)
    return found


def test_state_of_one_device_is_four_float32_arrays():
    count = GPT.num_parameters
    found = only()
    assert (found.parameters, found.optimizer) == (4 * count, 8 * count)
    low = only(training=LOW)
    # two moments and the master, beside parameters in 16 bits
    assert (low.parameters, low.optimizer) == (2 * count, 12 * count)
    assert only(num_microbatches=2).gradients == 4 * count


@pytest.mark.parametrize("training", [WIDE, LOW])
def test_zero_divides_what_its_stage_names_and_nothing_else(training):
    base = only(training=training, num_microbatches=2, dp=4)
    parts = ("parameters", "gradients", "optimizer")
    for stage, divided in ((1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))):
        found = only(training=training, num_microbatches=2, sharding=4, sharding_stage=stage)
        assert [getattr(found, part) for part in parts] == [
            getattr(base, part) / by for part, by in zip(parts, divided, strict=True)
        ]


@pytest.mark.parametrize("compiler", ["accelerator", "cpu"])
def test_blocks_that_recompute_hold_less(compiler):
    activations = [
        only(compiler=compiler, recompute="full", recompute_share=share).activations for share in (1.0, 0.5, 0.25)
    ] + [only(compiler=compiler).activations]
    # on a processor the moment that holds most may be one when the head has gone: three values of its width, packed
    head = 3.1 * 4 * 8 * 128 * 64 * (compiler == "cpu")
    assert activations[1] == pytest.approx((activations[0] + activations[3]) / 2, abs=head)
    assert activations[2] == pytest.approx(activations[0] / 4 + activations[3] * 3 / 4, abs=head)
    assert activations[0] < activations[2] < activations[3]


def test_a_framework_keeps_what_it_is_said_to():
    """34 bytes of a layer's token and width, of which masks are 2: arXiv:2205.05198, section 4.1."""
    megatron = Training(keeps=framework("megatron").memory)
    layers = (memory(replace(GPT, layers=n).graph(), Plan(), 8, megatron, "accelerator")[0].activations for n in (5, 4))
    token = 8 * 128 * 64
    scores = 4 * 8 * 128 * 4  # log sums of fused attention
    assert next(layers) - next(layers) == 32 * token + scores
    whole = memory(GPT.graph(), Plan(), 8, megatron)[0]
    assert whole.workspace >= 8 * 8 * 128 * 512  # logits are not cut into chunks
    tuned = memory(GPT.graph(), Plan(), 8, replace(megatron, trains="adapters"))[0]
    assert (tuned.gradients, tuned.optimizer) == (0, 0)
    cheap = memory(GPT.graph(), Plan(), 8, replace(megatron, cheap=True))[0]
    assert cheap.activations < 0.8 * whole.activations


def test_a_pipeline_keeps_whole_gradients_between_microbatches():
    def gradients(stage, **more):
        plan = Plan.from_degrees(pp=2, sharding=4, sharding_stage=stage, **{"num_microbatches": 2, **more})
        return memory(GPT.graph(), plan, 16, Training(sums="program"))[0].gradients

    assert gradients(2) == gradients(1) == 4 * gradients(3)
    assert gradients(2, num_microbatches=1) == gradients(3)


def test_a_parameter_that_does_not_divide_stays_whole():
    odd = replace(GPT, hidden=60, heads=4, ffn=240, vocab=511, seq=127)
    # sharding 8 divides 240 (ffn, its bias and qkv's heads * 3) and nothing of 60, 511 or 127
    found = only(odd, sharding=8, sharding_stage=3)
    divided = odd.layers * (2 * 60 * 240 + 240)
    rest = odd.num_parameters - divided
    heads = odd.layers * (60 * 180 + 180 + 60 * 60 + 60)
    assert 4 * (divided / 8 + rest - heads) <= found.parameters <= 4 * (divided / 8 + rest)


def test_tensor_parallel_divides_matrices_and_leaves_norms():
    whole, half = only().parameters, only(mp=2).parameters
    # norms (scale and shift), biases after a row-parallel product, positions
    kept = GPT.layers * (4 * 64 + 2 * 64) + 2 * 64 + GPT.seq * 64
    assert half == (whole - 4 * kept) / 2 + 4 * kept


def test_activations_of_a_layer_by_hand():
    tokens, width = 8 * 128, 64
    per_layer = only(replace(GPT, layers=5)).activations - only().activations
    # two inputs of norms and their outputs, q k v, attention's output, and of the feed-forward up and its GELU
    floats = tokens * (4 * width + 3 * width + width + 4 * width + 4 * width)
    assert per_layer == 4 * (floats + 8 * 4 * 128)  # and a log-sum for each head and query
    full = only(replace(GPT, layers=5), recompute="full").activations - only(recompute="full").activations
    assert full == 4 * tokens * width


def test_sequence_parallel_splits_the_residual_stream_too():
    def layer(**plan):
        return only(replace(GPT, layers=5), **plan).activations - only(**plan).activations

    residual = 4 * 8 * 128 * 64
    # x, x after attention, and both norms' outputs
    assert layer(mp=2) - layer(mp=2, sequence_parallel=True) == 4 * residual / 2
    assert layer(sep=2) == layer() / 2


@pytest.mark.parametrize("compiler", ["accelerator", "cpu"])
@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_more_samples_or_less_recompute_need_no_less(shape, compiler):
    by_batch = [only(shape, batch, compiler=compiler).total for batch in (1, 2, 4, 8, 16, 64)]
    assert by_batch == sorted(by_batch)
    by_mode = [only(shape, 64, compiler=compiler, recompute=mode).total for mode in reversed(RECOMPUTE)]
    assert by_mode == sorted(by_mode) if compiler == "accelerator" else by_mode[0] < by_mode[-1]
    assert only(shape, 64, compiler=compiler, dp=4).total < by_batch[-1]
    # the processor's program for several devices keeps all microbatches at once, others one
    for dp in (1, 2):
        whole, cut = (only(shape, 64, compiler=compiler, dp=dp, num_microbatches=n).activations for n in (1, 4))
        assert cut > 0.99 * whole if (compiler, dp) == ("cpu", 2) else cut < whole / 3


def test_a_chunk_works_in_what_its_blocks_at_hand_need():
    """On a processor: blocks that are computed again work one after another; those that are not, all at once."""

    def work(**plan: Any) -> float:
        found = memory(
            replace(GPT, layers=8).graph(), Plan.from_degrees(pp=2, num_microbatches=4, **plan), 32, LOW, "cpu"
        )
        return found[0].workspace

    assert work(recompute="full") < work(recompute="full", recompute_share=0.5) < 1.1 * work()
    deep = memory(replace(GPT, layers=16).graph(), Plan.from_degrees(pp=2, num_microbatches=4), 32, LOW, "cpu")
    assert deep[0].workspace > 1.6 * work()


def test_a_backward_of_parts_again_never_needs_all_that_stood_behind_them():
    """On a processor: what lies behind attention had its backward when attention is computed again, and attention's
    weights are widened block by block; a deeper chunk has more of the rest."""

    def work(layers: int, **plan: Any) -> float:
        graph = replace(GPT, layers=layers).graph()
        return memory(graph, Plan.from_degrees(pp=2, num_microbatches=4, **plan), 32, LOW, "cpu")[0].workspace

    assert work(8, recompute="full") < work(8, recompute="full_attn") < work(8)
    assert work(16, recompute="full_attn") > 1.4 * work(8, recompute="full_attn")


def test_products_of_one_input_gather_it_once():
    """Of a sequence that is cut outside of blocks: query, key and value read one gathered array, as gate and up do."""
    plan = Plan.from_degrees(mp=2, sequence_parallel=True)
    (block,) = (each for each in LLAMA.graph().blocks if each.part == "layer")
    for itemsize in (4, 2):
        kept = memory_cpu.kept_by_block(block, cuts_of(plan), 8, itemsize)
        assert sum(name.startswith(("attention_norm_out", "ffn_norm_out")) for name in kept) == 2


def test_a_frozen_product_keeps_nothing_for_its_weight():
    """Adapters beside query and value: their input stays, those of the feed-forward go."""
    adapters = replace(WIDE, trains="adapters")
    everywhere, attention = (
        only(LLAMA, training=replace(adapters, adapted=which)).activations for which in ("all", "attention")
    )
    wide = 4 * 8 * 128 * 256 * LLAMA.layers  # what the last product reads, bytes
    assert everywhere - attention >= wide
    assert everywhere < only(LLAMA, training=WIDE).activations


def test_adapters_keep_what_their_frozen_map_gave_and_nothing_of_frozen_norms():
    """On a processor: in float32 the frozen map's part and the sum, where an activation function reads it; of frozen
    norms no normalised values."""
    graph = replace(LLAMA, layers=2).graph()
    adapted = beside_adapters(graph, ["q", "gate", "up"])
    (whole, tuned) = (next(b for b in each.blocks if b.part == "layer") for each in (graph, adapted))
    wide, low = (set(memory_cpu.kept_by_block(tuned, cuts_of(Plan()), 8, itemsize)) for itemsize in (4, 2))
    assert wide - low == {"gate: of the frozen weight", "up: of the frozen weight"}
    gone = set(memory_cpu.kept_by_block(whole, cuts_of(Plan()), 8, 4)) - wide
    assert {name for name in gone if "norm" in name} == {"attention_norm: normalised", "ffn_norm: normalised"} | {
        name for name in gone if name.endswith("_norm_out")
    }
    # what is frozen already stays so, whichever maps are asked for next
    assert beside_adapters(adapted, ["down"]) == adapted

    def activations(layers: int, **training: Any) -> float:
        return only(replace(LLAMA, layers=layers), training=replace(WIDE, **training), compiler="cpu").activations

    query = 4 * 8 * 128 * 64  # bytes; keys and values have half of it each
    layer = activations(5) - activations(4)
    # gate and up twice; what goes into them and into the last product stays for the adapters' own small products, where
    # large ones make it again
    more = memory_cpu.PACKING * (2 * 4 + 1 + 4) * query
    assert activations(5, **ALL) - activations(4, **ALL) - layer == pytest.approx(more)


def test_traced_models_have_their_attention_s_rows_by_any_name():
    """Of a row that is one block of queries, the probabilities of every head are kept, whatever its sums are called."""
    short = replace(GPT, seq=memory_cpu.QUERIES)
    (block,) = (b for b in short.graph().blocks if b.part == "layer")
    (op,) = (op for op in block.operations if op.kind == "attention")
    sums = next(value for value in op.inputs if value.name == "log_sums")
    traced = replace(op, inputs=(*op.inputs[:-1], replace(sums, name="v13_log_sums")))

    def left(op: Any) -> dict[str, float]:
        return {what: total([held]) for what, held in memory_cpu.kept_by_attention(op, cuts_of(Plan()), 8)}

    assert left(traced)["probabilities"] == 4 * 8 * 4 * 64 * 64
    assert left(traced)["log sums"] == 4 * 8 * 4 * 64
    # with dropout they are there before and after it
    assert left(replace(traced, drops=True))["probabilities"] == 2 * 4 * 8 * 4 * 64 * 64


def test_weights_put_off_are_widened_and_turned_round():
    """Of a backward cut in two, on a processor in 16 bits: gradients of outputs in float32, for weight and bias, what
    went into the products turned round, and gradients of norms in float32."""
    plan = Plan.from_degrees(pp=2, num_microbatches=4, schedule="ZBH1")
    _, last = stage_pieces(GPT.graph(), plan)
    token, width = 4 * 128, 64  # of a microbatch
    for training, itemsize, wide in ((LOW, 2, 2 * 4), (WIDE, 4, 0)):
        stage = Stage(GPT.graph(), plan, 16, training, last)
        layers = sum(count for block, count in stage.blocks if block.part == "layer")
        inputs, outputs, norms = (1 + 1 + 1 + 4) * width, (3 + 1 + 4 + 1) * width, 2 * width
        layer = token * (inputs * itemsize + outputs * wide + norms * 4)
        assert OnProcessor(stage).of_weights(last[0]) == layers * layer + token * width * 4


def test_rows_of_experts_have_loops_that_start_from_zeros():
    shape = replace(LLAMA, experts=4, experts_per_token=2)
    plan = Plan()
    (block,) = (b for b in shape.graph().blocks if b.part == "layer")
    for training, itemsize in ((WIDE, 4), (LOW, 2)):
        stage = Stage(shape.graph(), plan, 8, training, stage_pieces(shape.graph(), plan)[0])
        buffers = OnProcessor(stage).residuals(block)[0]
        rows = 8 * 128 * 2
        assert buffers["expert_down: start of the gradient of rows"].nbytes == rows * 256 * itemsize
        assert buffers["expert_up: start of the gradient of weights"].nbytes == 4 * 64 * 256 * itemsize
        # loops read rows in float32, and weights: what is the same in every turn is made before them
        assert (buffers["routed"].nbytes, buffers["expert_bent"].nbytes) == (rows * 64 * 4, rows * 256 * 4)
        widened = total(OnProcessor(stage).weights([(block, 1)]))
        assert widened == (4 * sum(v.size for v in block.parameters if len(v.shape) > 1) if itemsize == 2 else 0)
        # where attention alone is computed again there is no second forward of experts
        partly = Stage(shape.graph(), Plan(recompute="core_attn"), 8, training, stage_pieces(shape.graph(), plan)[0])
        assert not any("expert_down: start of the output" in name for name in OnProcessor(partly).residuals(block)[0])
        # a second forward has loops of its own
        again = Stage(shape.graph(), Plan(recompute="full"), 8, training, stage_pieces(shape.graph(), plan)[0])
        assert OnProcessor(again).residuals(block)[0]["expert_down: start of the output"].nbytes == rows * 64 * itemsize


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(2, 1), (2, 5), (4, 3), (4, 8), (4, 21)])
def test_live_microbatches_are_those_of_the_schedule(name, pp, m):
    virtual = {"VPP": 3, "ZBVPP": 2, "DualPipeV": 2}.get(name, 1)
    plan = Plan.from_degrees(pp=pp, schedule=name, num_microbatches=m, virtual_stages=virtual)
    schedule = make_schedule(name, pp, m, virtual)
    for stage in range(pp):
        assert max(sum(s.live) for s in standings(plan, stage)) == schedule.peak_live(stage)


def test_stages_of_a_pipeline_hold_their_share():
    plan = Plan.from_degrees(pp=2, num_microbatches=4)
    first, last = memory(GPT.graph(), plan, 16, WIDE)
    # the head is tied: its table is the first stage's, its gradient is on both
    assert first.parameters + last.parameters == 4 * GPT.num_parameters
    assert first.gradients + last.gradients == 4 * (GPT.num_parameters + 512 * 64)
    # the first stage keeps two microbatches, the last one
    assert first.activations > 1.5 * last.activations
    more, _ = memory(GPT.graph(), Plan.from_degrees(pp=2, num_microbatches=4, schedule="FThenB"), 16, WIDE)
    assert more.activations == 2 * first.activations


def test_what_is_offloaded_is_not_on_the_device():
    found = only(offload=["state"])
    assert found.optimizer == 0
    assert found.parameters == only().parameters
    deep = replace(GPT, layers=8)
    kept = only(deep, 64, recompute="full", offload=["act"]).activations
    # inputs of two blocks of eight stay; embedding and head as before
    assert kept == only(deep, 64, recompute="full").activations - 6 * 4 * 64 * 128 * 64


def test_the_processor_model_follows_the_kernels():
    for seq in (32, 64, 65, 128, 256, 300, 1024):
        for causal in (True, False):
            ours = memory_cpu.spans(seq, causal)
            spec = attention_blocked.AttentionSpec(causal, 1.0, 0.0)
            theirs = [(s.stop - s.start, s.blocks, s.keys) for s in attention_blocked.spans(spec, seq, seq)]
            assert [tuple(s) for s in ours] == theirs
    assert CHUNK_BYTES == CHUNK
    for rows, vocab in ((60, 1 << 20), (2048, 16384), (2047, 16384), (8191, 50304), (8192, 50304), (4092, 1000)):
        assert chunks_of_tokens(rows, vocab) == chunk_count(rows, vocab)
    assert attention_blocked.BLOCK_QUERIES == memory_cpu.QUERIES
    assert grouped.WIDE == memory_cpu.ROWS
    assert LARGE == memory_cpu.COPIED


def test_values_lie_in_free_buffers_largest_first():
    assert total([Held(3.0, 2), Held(1.0)]) == 7
    # one of 5 in the 6; of the two of 3, one in the 4; the 1 in what is left of nothing
    assert memory_cpu.reused([Held(3, 2), Held(5)], [Held(4), Held(6)]) == 8
    assert memory_cpu.reused([Held(7)], [Held(6, 3)]) == 0
