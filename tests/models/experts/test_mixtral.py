"""Mixtral: the recorded function of transformers' MixtralForCausalLM, its losses, placement, refusals."""

import numpy as np
import pytest

from polyreme.core import rng
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, PlacementError
from polyreme.mesh import Plan
from polyreme.models.experts.mixtral import Mixtral, MixtralConfig
from tests.models import parity


def nano(**changes):
    rng.seed(5)
    return Mixtral(MixtralConfig.nano(**changes))


def rows(seed=0):
    return to_tensor(np.random.default_rng(seed).integers(0, 128, (2, 16)))


@pytest.mark.slow
def test_is_the_function_of_mixtral():
    recording = parity.read("mixtral")
    model = parity.load_published(Mixtral(MixtralConfig(**recording.config)), recording.weights)
    parity.assert_same_function(model, recording, parity.as_ours(model, recording.grads))


def test_training_adds_the_routers_losses_and_evaluation_does_not():
    model, tokens = nano(balance_loss=0.5), rows()
    with_losses = model(tokens, tokens).item()
    model.eval()
    plain, (_, routers) = model(tokens, tokens).item(), model.hidden(tokens)
    assert 0.5 * 2 <= routers.item() < 0.5 * 2 * 2  # two layers, about 1 each
    assert with_losses == pytest.approx(plain + routers.item(), rel=1e-6)


def test_a_capacity_drops_choices():
    model, free, tokens = nano(capacity_factor=0.5), nano(), rows()
    model.set_state_dict(free.state_dict())
    assert not np.allclose(model(tokens).numpy(), free(tokens).numpy())
    router = model.blocks[0].ffn.router
    hidden = model.embed(tokens)[0]
    routing = router(hidden)
    assert router.capacity(32) == 8
    assert [int((routing.choices.numpy() == e).sum()) for e in range(4)] == [8] * 4
    assert routing.load.numpy().sum() == 64


@pytest.mark.one_in(2)
@pytest.mark.parametrize("routing", ["expert_choice", "hash"])
def test_experts_or_ids_choose(routing, tmp_path):
    model, tokens = nano(routing=routing, num_layers=1), rows()
    loss = model(tokens, tokens)
    loss.backward()
    assert all(np.abs(p.grad.numpy()).max() > 0 for p in model.parameters())
    router, hidden = model.blocks[0].ffn.router, model.embed(tokens)
    if routing == "hash":
        np.testing.assert_array_equal(hidden[2].numpy(), tokens.numpy())
        assert router(hidden[2]).load.numpy().sum() == 2 * 16 * 2
    else:
        # of each of two sequences of 16 tokens half, as the planner counts
        assert model.config.tokens_per_expert == router.capacity(16) == 8
        assert router(hidden[0]).load.tolist() == [16] * 4
    with pytest.raises(ConfigError, match=f"routing {routing} has no published form"):
        model.save_pretrained(tmp_path / "folder")
    assert not list(tmp_path.glob("**/*.*"))


def test_a_plan_splits_experts():
    model = nano()
    try:
        apply_plan(Plan.from_degrees(ep=4, mp=2), model)
        ffn = model.blocks[0].ffn
        assert ffn.up._array.addressable_shards[0].data.shape == (1, 32, 16)
        assert ffn.down._array.addressable_shards[0].data.shape == (1, 16, 32)
        assert ffn.router.weight._array.addressable_shards[0].data.shape == (32, 4)
    finally:
        clear_plan()
    with pytest.raises(PlacementError, match=r"dim 'expert' of size 4 .* set ep to"):
        apply_plan(Plan.from_degrees(ep=8), nano())
    clear_plan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 5}, "experts_per_token 5 of 4 experts; make it 1 to 4"),
        ({"num_experts": 0}, "num_experts is 0; give at least 1"),
        ({"balance_loss": -1.0}, "balance_loss -1.0"),
        ({"routing": "tokens"}, "routing 'tokens'; one of token_choice, expert_choice, hash"),
        (
            {"balance_scope": "global_batch", "routing": "hash"},
            "'global_batch' with balance_loss 0.0, which takes micro_batch\n",
        ),
        ({"routing": "hash", "balance_loss": 0.1}, "balance_loss 0.1 with routing hash, which no loss balances"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        MixtralConfig.nano(**changes)
