"""Models from dimensions: parameters as the recipes count them, FLOP as the papers do."""

import pytest

from polyreme.errors import ConfigError
from polyreme.planner import ModelShape, Value
from polyreme.planner.conventions import HARDWARE, MODEL, flops_by_convention, measured_seconds
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.estimate import num_parameters

GPT = ModelShape(hidden=256, layers=3, heads=8, seq=128, vocab=512, ffn=1024)
LLAMA = ModelShape(
    hidden=256,
    layers=3,
    heads=8,
    kv_heads=2,
    seq=128,
    vocab=512,
    ffn=704,
    gated=True,
    biases=False,
    learned_positions=False,
    tied=False,
    rms_norm=True,
)
BERT = ModelShape(
    hidden=256,
    layers=3,
    heads=8,
    seq=128,
    vocab=512,
    ffn=1024,
    norm_places="sum",
    embedding_norm=True,
    head_bias=True,
    sees_all=True,
    token_types=2,
    asked=19,
)
MIXTRAL = ModelShape(
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    seq=4096,
    vocab=32000,
    ffn=14336,
    experts=8,
    experts_per_token=2,
    gated=True,
    biases=False,
    learned_positions=False,
    tied=False,
    rms_norm=True,
)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (GPT, {"family": "gpt"}),
        (LLAMA, {"family": "llama", "num_kv_heads": 2, "ffn_size": 704, "tie_embeddings": False}),
        (BERT, {"family": "bert"}),
    ],
)
def test_parameters_are_those_that_the_recipes_count(shape, settings):
    config = ModelConfig.model_validate(
        {"hidden_size": 256, "num_layers": 3, "num_heads": 8, "vocab_size": 512, "seq_len": 128, **settings}
    )
    assert shape.num_parameters == num_parameters(config)


def test_an_encoder_predicts_the_words_that_it_is_asked_for():
    """Scores of all keys, and logits of 19 places of 128."""
    head = BERT.graph().blocks[-1]
    (logits,) = (op for op in head.operations if op.name == "logits")
    assert logits.output.shape == (1, 19, 512)
    assert logits.flops == 2 * 19 * 256 * 512
    (attention,) = (op for op in BERT.graph().blocks[1].operations if op.kind == "attention")
    assert attention.executed == 1.0


def test_published_parameter_counts():
    """arXiv:2401.04088: 46.7 billion, of which 12.9 work on a token; GPT-2's 124,439,808."""
    assert MIXTRAL.num_parameters == 46_702_792_704
    assert MIXTRAL.num_active_parameters / 1e9 == pytest.approx(12.88, abs=0.01)
    assert ModelShape(768, 12, 12, 1024, 50257, 3072).num_parameters == 124_439_808


@pytest.mark.parametrize("shape", [GPT, LLAMA, MIXTRAL])
@pytest.mark.parametrize("attention", ["fused", "plain"])
def test_flops_a_token_are_six_a_matrix_element_and_twelve_for_attention(shape, attention):
    """PaLM, appendix B: 6 N + 12 L H Q T, N without tables, norms and biases; of experts those that work."""
    costs = shape.graph(attention)
    weights = {value.name: value for block in costs.blocks for value in block.parameters}
    expected = 0.0
    for block in costs.blocks:
        for op in block.operations:
            if op.kind != "product" or not op.weights:
                continue
            working = shape.experts_per_token / shape.experts if "expert" in weights[op.weights[0]].dims else 1
            expected += 6 * block.repeats * weights[op.weights[0]].size * working
    expected += 12 * shape.layers * shape.heads * shape.head_dim * shape.seq
    assert costs.flops_per_token == pytest.approx(expected, rel=1e-12)  # sums of a few dozen integers in doubles


def test_saved_values_and_weights_exist():
    """Every name that an operation gives is that of one of its values, or of a parameter."""
    for shape in (GPT, LLAMA, MIXTRAL, ModelShape(64, 2, 4, 16, 128, 256, dropout=True)):
        for attention in ("fused", "plain"):
            costs = shape.graph(attention)
            for block in costs.blocks:
                names = {value.name for value in block.parameters}
                for op in block.operations:
                    values = {value.name for value in (*op.inputs, op.output)}
                    assert set(op.saved) <= values, op.name
                    assert all(name in names or costs.parameter(name) for name in op.weights), op.name


def test_experts_after_dense_layers_and_beside_shared_ones():
    shape = ModelShape(
        64, 5, 4, 32, 128, 256, gated=True, experts=4, experts_per_token=1, dense_layers=2, expert_ffn=128
    )
    plain, sparse = shape.graph().blocks[1:3]
    assert (plain.repeats, sparse.repeats) == (2, 3)
    shared = ModelShape(64, 1, 4, 32, 128, 256, experts=4, experts_per_token=1, expert_ffn=128, shared_experts=1)
    names = [op.name for op in shared.graph().blocks[1].operations]
    assert names.index("combine") < names.index("shared_add")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0; give at least 1"),
        ({"heads": 7}, "hidden=256 does not divide into heads=7; give head_dim, or heads=8"),
        ({"kv_heads": 3}, "heads=8 is not a multiple of kv_heads=3; make kv_heads 2"),
        ({"kv_heads": -4}, "kv_heads=-4; give at least 0"),
        ({"experts": 4}, "experts_per_token=0 of experts=4; give 1 to 4"),
    ],
)
def test_refuses_what_it_cannot_do(changes, message):
    values = {"hidden": 256, "layers": 3, "heads": 8, "seq": 128, "vocab": 512, "ffn": 1024}
    with pytest.raises(ConfigError, match=message):
        ModelShape(**{**values, **changes})


def test_unknown_attention_and_parameters_are_refused():
    with pytest.raises(ConfigError, match="attention 'flash' of model 'transformer'"):
        GPT.graph("flash")
    with pytest.raises(ConfigError, match="no parameter 'token'; did you mean 'tokens'"):
        GPT.graph().parameter("token")


def test_flops_by_conventions():
    """Megatron-LM's two formulas, and what PaddleFleetX leaves out of the first."""
    gpt = ModelShape(hidden=12288, layers=96, heads=96, seq=2048, vocab=51200, ffn=49152)
    b, s, h, layers, vocab = 1536, 2048, 12288, 96, 51200
    model = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert flops_by_convention(MODEL, gpt, b) == pytest.approx(model)
    assert flops_by_convention("model: 72BsLh^2(1+s/6h+V/12hL)", gpt, b) == pytest.approx(model)
    assert flops_by_convention("model (causal not halved)", gpt, b) == pytest.approx(model, rel=1e-12)
    hard = 96 * b * s * layers * h**2 * (1 + s / (6 * h))
    assert flops_by_convention("source uses 96BsLh^2(1+s/6h) (full-recompute HFU)", gpt, b) == pytest.approx(hard)
    extra = 96 * b * s * layers * h**2 * vocab / (16 * layers * h)
    assert flops_by_convention(f"hardware: {HARDWARE}", gpt, b) == pytest.approx(hard + extra)
    tokens = b * s
    assert flops_by_convention("6N", gpt, b) == pytest.approx(6 * gpt.num_parameters * tokens)
    scores = 12 * layers * h * s * tokens
    assert flops_by_convention("MFU derived 6N+12Lhs, causal not halved", gpt, b) == pytest.approx(
        6 * gpt.num_parameters * tokens + scores
    )
    assert flops_by_convention("model, causal halved", gpt, b) == pytest.approx(model - scores / 2)


def test_measured_seconds_come_from_what_a_table_prints():
    assert measured_seconds({"step_s": "2.5"}, GPT, 8, 4) == 2.5
    assert measured_seconds({"tokens_s_dev": 128.0}, GPT, 8, 4) == 8 * 128 / (128 * 4)
    row = {"tflops_dev": "0.001", "flops_convention": "model"}
    assert measured_seconds(row, GPT, 8, 4) == pytest.approx(GPT.graph().flops_per_token * 8 * 128 / 4e9)
    assert measured_seconds({}, GPT, 8, 4) is None


def test_values_count_their_elements():
    assert Value("x", ("batch", None), (1, 6)).size == 6
