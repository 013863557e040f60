"""The parameter count of an estimate is that of the model that is built, for every family."""

import pytest

from polyreme.models.families import FAMILIES
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.estimate import flops_per_token, num_parameters
from polyreme.recipes.weights.build import build_model

# no two sizes alike, so that no two dims can be taken for each other
SIZES = {"vocab_size": 52, "hidden_size": 24, "num_layers": 3, "num_heads": 4, "seq_len": 17}
MODELS = {
    **{name: {"family": name} for name, family in FAMILIES.items() if family.samples == "tokens"},
    "gpt_ffn": {"family": "gpt", "ffn_size": 80},
    "llama_grouped": {"family": "llama", "num_kv_heads": 2, "ffn_size": 80},
    "qwen3_moe_wide": {"family": "qwen3_moe", "head_dim": 10, "num_experts": 5, "expert_ffn_size": 28},
    "deepseek_v3_narrow": {
        "family": "deepseek_v3",
        "q_lora_rank": 18,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "num_experts": 5,
        "expert_ffn_size": 28,
        "n_shared_experts": 3,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 2,
    },
    "mixtral_narrow": {"family": "mixtral", "num_experts": 5, "experts_per_token": 3, "expert_ffn_size": 28},
}


def _sizes_of(family):
    """Those that the family has."""
    return {name: size for name, size in SIZES.items() if name in (*FAMILIES[family].dimensions, "num_layers")}


every_model = pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            ModelConfig(**_sizes_of(given["family"]), **given, tie_embeddings=tied),
            id=f"{name}_{'tied' if tied else 'untied'}",
        )
        for name, given in MODELS.items()
        for tied in (True, False)
    ],
)


@every_model
def test_num_parameters_is_that_of_the_model(config):
    assert num_parameters(config) == sum(p.size for p in build_model(config).parameters())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["end", "origin"])
def test_an_evoformer_costs_what_is_built(where):
    sizes = {"msa_width": 12, "pair_width": 10, "msa_heads": 3, "pair_heads": 2, "head_dim": 5, "outer_width": 7}
    sizes |= {"triangle_width": 9, "transition_factor": 3, "num_layers": 4, "outer_product_mean": where}
    config = ModelConfig(family="evoformer", **sizes)
    model = build_model(config)
    assert num_parameters(config) == sum(p.size for p in model.parameters())
    # with one sequence of one residue every product of a weight is made once, and all that mixes is a few numbers
    one = config.model_copy(update={"num_sequences": 1, "num_residues": 1})
    matrices = [p for name, p in model.blocks.named_parameters() if len(p.shape) > 2 and "gate_bias" not in name]
    products = sum(p.size for p in matrices) + model.letter_head.weight.size + model.distance_head.weight.size
    mixing = 4 * (2 * 2 * 3 * 5 + 4 * 2 * 5 + 7 * 7 + 2 * 9)
    assert flops_per_token(one) == 6 * (products + mixing)


@pytest.mark.one_in(6)
@every_model
def test_flops_per_token_leaves_out_look_up_tables_only(config):
    # 6 FLOP for each number but those of look-up tables (biases and gains count too: they are few) and of experts that
    # a token does not choose; a tied table is also the output projection
    tables = {"positions.weight"} if config.tie_embeddings else {"positions.weight", "tokens.weight"}
    numbers = {name: (p.dims, p.size) for name, p in build_model(config).named_parameters() if name not in tables}
    part = {True: config.experts_per_token / config.num_experts if config.num_experts else 1, False: 1}
    counted = sum(size * part["expert" in dims] for dims, size in numbers.values())
    scores = 2 * (config.head_dim * config.num_heads or config.hidden_size)
    if config.family in (
        "deepseek_v2",
        "deepseek_v3",
    ):  # queries and values of widths of their own, by default 6 + 2 and 6
        scores = config.num_heads * (7 + 4 + 10 if config.v_head_dim else 8 + 6)
    ahead = config.num_nextn_predict_layers
    counted += ahead * config.vocab_size * config.hidden_size  # they use the model's output projection
    attention = 6 * (config.num_layers + ahead) * config.seq_len * scores
    if config.family in ("mamba", "mamba2"):  # of each number of a state 24
        attention = 24 * config.num_layers * 2 * config.hidden_size * {"mamba": 16, "mamba2": 128}[config.family]
    assert flops_per_token(config) == 6 * counted + attention
