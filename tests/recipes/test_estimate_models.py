"""The parameter count of an estimate is that of the model that is built, for every family."""

import pytest

from polyreme.models.families import FAMILIES
from polyreme.recipes.build import build_model
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.estimate import flops_per_token, num_parameters

# no two sizes alike, so that no two dims can be taken for each other
SIZES = {"vocab_size": 52, "hidden_size": 24, "num_layers": 3, "num_heads": 4, "seq_len": 17}
MODELS = {
    **{name: {"family": name} for name in FAMILIES},
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
every_model = pytest.mark.parametrize(
    "config",
    [
        pytest.param(ModelConfig(**SIZES, **given, tie_embeddings=tied), id=f"{name}_{'tied' if tied else 'untied'}")
        for name, given in MODELS.items()
        for tied in (True, False)
    ],
)


@every_model
def test_num_parameters_is_that_of_the_model(config):
    assert num_parameters(config) == sum(p.size for p in build_model(config).parameters())


@every_model
def test_flops_per_token_leaves_out_look_up_tables_only(config):
    # 6 FLOP for each number but those of look-up tables (biases and gains count too: they are few) and of experts that
    # a token does not choose; a tied table is also the output projection
    tables = {"positions.weight"} if config.tie_embeddings else {"positions.weight", "tokens.weight"}
    numbers = {name: (p.dims, p.size) for name, p in build_model(config).named_parameters() if name not in tables}
    part = {True: config.experts_per_token / config.num_experts if config.num_experts else 1, False: 1}
    counted = sum(size * part["expert" in dims] for dims, size in numbers.values())
    scores = 2 * (config.head_dim * config.num_heads or config.hidden_size)
    if config.family == "deepseek_v3":  # queries and values of widths of their own, by default 6 + 2 and 6
        scores = config.num_heads * (7 + 4 + 10 if config.v_head_dim else 8 + 6)
    ahead = config.num_nextn_predict_layers
    counted += ahead * config.vocab_size * config.hidden_size  # they use the model's output projection
    attention = 6 * (config.num_layers + ahead) * config.seq_len * scores
    assert flops_per_token(config) == 6 * counted + attention
