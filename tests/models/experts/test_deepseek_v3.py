"""DeepSeek-V3: the recorded function of transformers' DeepseekV3ForCausalLM, its widths, plans, refusals."""

import numpy as np
import pytest
from scipy.special import log_softmax

from polyreme.core import rng
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.models.experts.deepseek_v3 import DeepseekV3, DeepseekV3Config
from polyreme.models.parts.rotary import Yarn
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.weights.build import build_model
from tests.models import parity


def recorded(name):
    """A DeepseekV3 with recorded weights, and the recording; nothing balances its experts, as in the reference."""
    recording = parity.read(name)
    config = DeepseekV3Config(**recording.config, bias_rate=0.0, sequence_loss=0.0)
    return parity.load_published(DeepseekV3(config), recording.weights), recording


@pytest.mark.slow
def test_is_the_function_of_deepseek_v3():
    model, recording = recorded("deepseek_v3")
    parity.assert_same_function(model, recording, parity.as_ours(model, recording.grads))


# plain: without latent queries, groups and YaRN
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_plain"])
def test_its_logits_are_those_of_deepseek_v3(name):
    model, recording = recorded(name)
    want = recording.arrays["logits"]
    atol = parity.tolerance(parity.forward_terms(recording.config, 13), want)
    np.testing.assert_allclose(model(to_tensor(recording.tokens)).numpy(), want, rtol=0, atol=atol)


@pytest.mark.slow
def test_each_sequence_is_balanced_while_training():
    rng.seed(5)
    model = DeepseekV3(DeepseekV3Config.nano(sequence_loss=0.5))
    tokens = to_tensor(np.random.default_rng(0).integers(0, 128, (2, 16)))
    with_losses = model(tokens, tokens).item()
    model.eval()
    plain, (_, routers) = model(tokens, tokens).item(), model.hidden(tokens)
    assert 0.5 <= routers.item() < 1  # the second of two layers, about 1
    assert with_losses == pytest.approx(plain + routers.item(), rel=1e-6)


def test_mp_halves_heads_and_widths_of_feed_forwards():
    model = DeepseekV3(DeepseekV3Config.nano(q_lora_rank=12))
    ffn = {name: ("embed", "ffn") for name in ("gate", "up")} | {"down": ("ffn", "embed")}
    expert = {name: ("expert", "embed", "expert_ffn") for name in ("gate", "up")}
    dims = {
        "tokens.weight": ("vocab", "embed"),
        "head.weight": ("embed", "vocab"),
        "norm.weight": ("embed",),
        **{f"{name}_norm.weight": ("embed",) for name in ("attention", "ffn")},
        **{f"attention.{name}_norm.weight": ("embed",) for name in ("q", "kv")},
        **{f"attention.{name}_a.weight": ("embed", "latent") for name in ("q", "kv")},
        **{f"attention.{name}_b.weight": ("latent", "heads") for name in ("q", "kv")},
        "attention.out.weight": ("heads", "embed"),
        "ffn.router.weight": ("embed", None),
        **{f"0.ffn.{name}.weight": found for name, found in ffn.items()},
        **{f"ffn.shared.{name}.weight": found for name, found in ffn.items()},
        **{f"ffn.{name}": found for name, found in expert.items()},
        "ffn.down": ("expert", "expert_ffn", "embed"),
    }
    try:
        apply_plan(Plan.from_degrees(mp=2, dp=4), model)
        parity.assert_mp_halves_named_dims(model, dims)
    finally:
        clear_plan()


def test_widths_left_out_follow_from_the_others():
    config = DeepseekV3Config(hidden_size=96, num_heads=4)
    widths = (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    assert widths == (96, 24, 12, 24)
    assert (config.head_dim, config.ffn_size, config.expert_ffn_size) == (36, 256, 256)


def test_yarn_slows_long_waves_alone():
    yarn = Yarn(factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=0.5)
    cos, sin = yarn.table(50, 8, 100.0)
    angle = np.unwrap(np.arctan2(sin, cos).astype(np.float64), axis=0)[-1, :4] / 49
    # a pair makes 64 theta^(-i / 4) / (2 pi) turns: the first over 4, the last under 0.5
    np.testing.assert_allclose(angle * 100.0 ** (np.arange(4) / 4), [1, 0.75, 0.5, 0.25], rtol=1e-5)
    np.testing.assert_allclose(np.hypot(cos, sin), 1 + 0.1 * np.log(4), rtol=1e-6)
    assert yarn.score_scale == 1


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, r"hidden_size 32 is not a multiple of num_heads 3, .* or make hidden_size 30 or 33"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim 5 is odd, .* make it 4 or 6"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1; give at least 0"),
        ({"first_k_dense_replace": 2}, "2 of 2 layers leaves none for experts; make it at most 1"),
        ({"n_group": 3}, "n_group 3 groups of 4 experts; n_group must divide"),
        ({"n_group": 4}, "experts_per_token 2 from topk_group 1 of n_group 4"),
        ({"topk_group": 2}, "topk_group 2 of n_group 1"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor 0.0"),
        ({"bias_rate": -1.0}, "bias_rate -1.0"),
        ({"mtp_loss_weight": -1.0}, "mtp_loss_weight -1.0"),
        ({"num_nextn_predict_layers": 16}, "looks past the end of seq_len 16 tokens; make it at most 15"),
        ({"rope_scaling": YARN | {"type": "linear"}}, "unknown type 'linear'; the choices are yarn"),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "factor 0.5, .* give a factor and a length of at least 1"),
        (
            {"rope_scaling": {"factor": 4.0}},
            "original_max_position_embeddings'; give the fields of polyreme.models.parts.rotary.Yarn",
        ),
        ({"rope_scaling": YARN | {"fast": 1}}, "unexpected keyword argument 'fast'; give the fields"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DeepseekV3Config.nano(**changes)


def test_a_configuration_says_what_the_public_one_says():
    settings = {"rope_scaling": YARN, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    config = build_model(ModelConfig(family="deepseek_v3", hidden_size=32, num_heads=4, **settings)).config
    assert config.rope_scaling == Yarn(**YARN)
    assert (config.q_lora_rank, config.n_group, config.topk_group) == (12, 4, 2)
    for name, value in settings.items():
        with pytest.raises(ValueError, match=rf"{name}=.*: llama has none; leave it out or set family: deepseek_v3"):
            ModelConfig(family="llama", **{name: value})
    with pytest.raises(
        ValueError, match=r"capacity_factor=1\.0: deepseek_v3 has none; leave it out or set family: mix"
    ):
        ModelConfig(family="deepseek_v3", capacity_factor=1.0)


def test_modules_predict_one_token_further_each_while_training():
    rng.seed(5)
    sizes = {"sequence_loss": 0.5, "mtp_loss_weight": 0.25, "seq_len": 8}
    model = DeepseekV3(DeepseekV3Config.nano(**sizes, num_nextn_predict_layers=2))
    ids = np.random.default_rng(0).integers(0, 128, (2, 9))
    tokens, labels = to_tensor(ids[:, :-1]), np.where(np.arange(8) < 7, ids[:, 1:], -100)
    x, routers = model.hidden(tokens)
    want = model.logits((x, routers)).numpy()
    losses = [mean_loss(want, labels)]
    for depth, module in enumerate(model.mtp, 1):
        # of token i the embedding of token i + depth, 0 where no label says it, and what follows that one
        later = np.pad(ids, [(0, 0), (0, 3)])
        following = np.where(np.arange(8) < 8 - depth, later[:, depth : depth + 8], 0)
        joined = np.concatenate([module.token_norm(model.tokens(to_tensor(following))), module.hidden_norm(x)], -1)
        block = to_tensor(joined).matmul(module.join.weight)
        x, loss = module.block(block, model.cos[:8], model.sin[:8])
        x, routers = module.norm(x), routers + loss
        scored = np.where(np.arange(8) < 7 - depth, later[:, depth + 1 : depth + 9], -100)
        losses.append(mean_loss(model.logits((x, None)).numpy(), scored))
    got = model(tokens, to_tensor(labels))
    assert got.item() == pytest.approx(losses[0] + 0.25 * np.mean(losses[1:]) + routers.item(), rel=1e-5)
    got.backward()
    assert all(np.abs(p.grad.numpy()).max() > 0 for p in model.mtp.parameters() if p.ndim < 3)
    model.eval()
    assert model(tokens, to_tensor(labels)).item() == pytest.approx(losses[0], rel=1e-5)


def mean_loss(logits, labels):
    """The mean cross-entropy of the labels that are not -100."""
    likely = np.take_along_axis(log_softmax(logits, -1), np.maximum(labels, 0)[..., None], -1)[..., 0]
    return -likely[labels >= 0].mean()
