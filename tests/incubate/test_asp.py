"""incubate.asp: masks, models pruned to n of m, and training that keeps them so."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyreme as paddle
from polyreme import nn
from polyreme.errors import ConfigError, ShapeError
from polyreme.incubate import asp
from polyreme.incubate.asp import masks

# of PaddlePaddle 3.3.1, by hand
MATRIX = np.array(
    [
        [0.8, 0.13, 0.32, 1.33, -0.9, 0.07, 0.48, 1.04],
        [-0.06, 0.1, -0.34, 1.24, -0.32, 0.69, -0.1, 0.03],
        [-1.22, 0.06, -0.03, -1.48, -0.74, -0.45, -1.53, -1.22],
        [1.47, -1.03, -0.86, -1.4, 1.23, 0.92, 0.32, 0.08],
    ]
)
MASKS = {
    "mask_1d": ["10011001", "00111100", "10010011", "10011100"],
    "mask_2d_greedy": ["01101001", "01100110", "10010011", "10011100"],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_paddle(name):
    mask = masks.create_mask(MATRIX, name)
    assert ["".join(str(int(v)) for v in row) for row in mask] == MASKS[name]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(1, 2), (2, 4), (1, 4)]), st.integers(0, 9))
def test_masks_keep_n_of_m_and_the_best_keeps_most(rows, columns, pattern, seed):
    matrix = np.random.default_rng(seed).standard_normal((rows, columns))
    of_each = {name: masks.create_mask(matrix, name, *pattern) for name in masks.ALGORITHMS}
    for name, mask in of_each.items():
        assert masks.check_sparsity(mask, f"check_{name[:7]}", *pattern)
    if rows % pattern[1] == columns % pattern[1] == 0:
        sums = {name: np.abs(matrix * mask).sum() for name, mask in of_each.items()}
        # a greedy mask that leaves room in a row and in a column, which meet in an entry it has, may keep more
        if of_each["mask_2d_greedy"].sum() == of_each["mask_2d_best"].sum():
            assert sums["mask_2d_greedy"] <= sums["mask_2d_best"] + 1e-12
        assert sums["mask_2d_best"] <= sums["mask_1d"] + 1e-12
    assert not masks.check_mask_1d(np.ones((2, 4)), 2, 4)


def trained(model, optimizer, captured):
    def step(x):
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    step = paddle.jit.to_static(step) if captured else step
    for seed in range(3):
        step(paddle.to_tensor(np.random.default_rng(seed).standard_normal((2, 8)).astype("float32")))


@pytest.mark.parametrize("captured", [False, True])
def test_pruned_weights_stay_pruned(captured):
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = asp.decorate(paddle.optimizer.AdamW(0.01, parameters=model.parameters()))
    kept = asp.prune_model(model)
    assert set(kept) == {model[0].weight.name, model[2].weight.name}
    before = model[0].weight.numpy()
    trained(model, optimizer, captured)
    for layer in (model[0], model[2]):
        weight = layer.weight.numpy()
        assert asp.calculate_density(weight) == 0.5
        # along the inputs
        assert masks.check_sparsity(weight.T)
    assert (model[0].weight.numpy() != before).any()
    # a copy keeps its own
    copied = copy.deepcopy(model)
    trained(copied, paddle.optimizer.SGD(0.1, parameters=copied.parameters()), False)
    assert asp.calculate_density(copied[0].weight.numpy()) == 0.5


def test_algorithms_and_checks_by_paddle_s_names():
    values = np.arange(16.0).reshape(4, 4)
    mask = masks.create_mask(values, masks.MaskAlgo.MASK_2D_BEST)
    np.testing.assert_array_equal(mask, masks.create_mask(values, "mask_2d_best"))
    assert masks.check_sparsity(mask, masks.CheckMethod.CHECK_2D)
    assert not masks.check_sparsity(values, masks.CheckMethod.CHECK_1D)


def test_what_is_pruned_is_a_matter_of_names_and_classes():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4), nn.Conv2D(4, 4, 3), nn.Linear(3, 8), nn.Embedding(8, 4))
    asp.set_excluded_layers([model[0].full_name()])
    try:
        assert set(asp.prune_model(model, mask_algo="mask_2d_best")) == {model[1].weight.name, model[2].weight.name}
    finally:
        asp.reset_excluded_layers()
    np.testing.assert_array_equal((model[2].weight.numpy() != 0).sum(1), 2)
    asp.add_supported_layer(model[4], lambda weight, n, m, algo, name: (weight * 0, weight * 0))
    assert model[4].weight.name in asp.prune_model(model, with_mask=False)
    assert not model[4].weight.numpy().any()


def test_what_cannot_be_pruned_is_refused():
    with pytest.raises(ConfigError, match="n=4 of m=4"):
        asp.prune_model(nn.Linear(8, 8), n=4)
    with pytest.raises(ConfigError, match="too many masks to try"):
        asp.prune_model(nn.Sequential(nn.Linear(8, 8)), n=4, m=8, mask_algo="mask_2d_best")
    with pytest.raises(ConfigError, match="unknown mask_algo 'mask_3d'"):
        asp.prune_model(nn.Linear(8, 8), mask_algo="mask_3d")
    with pytest.raises(ConfigError, match="is no Layer"):
        asp.prune_model(paddle.ones([2]))
    with pytest.raises(ConfigError, match="neither a Layer"):
        asp.add_supported_layer(3)
    with pytest.raises(ConfigError, match="main_program is of static Programs"):
        asp.set_excluded_layers([], main_program=object())
    with pytest.raises(ShapeError, match="an array of 1 dims"):
        masks.get_mask_2d_greedy(np.ones(4), 2, 4)
