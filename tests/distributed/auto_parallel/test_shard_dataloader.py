"""shard_dataloader: batches of the same size and order, spread over meshes."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed import (
    ProcessMesh,
    Replicate,
    Shard,
    reshard,
    shard_dataloader,
    shard_optimizer,
    shard_tensor,
    to_static,
)
from polyreme.errors import ConfigError, DataError
from polyreme.io import DataLoader, Dataset

FIRST, SECOND = (ProcessMesh(np.arange(s, s + 4).reshape(2, 2), ["x", "y"]) for s in (0, 4))
X = np.arange(36, dtype=np.float32).reshape(9, 4)


class Pairs(Dataset):
    """(features, label), or a dict with two features."""

    def __init__(self, named=False):
        self.named = named

    def __getitem__(self, i):
        return {"inputs": [X[i], X[i] * 2], "label": X[i, 0]} if self.named else (X[i], X[i, 0])

    def __len__(self):
        return len(X)


def loader(named=False, batch_size=4):
    return DataLoader(Pairs(named), batch_size=batch_size)


def test_batches_are_whole_and_split_over_a_mesh_dim():
    spread = shard_dataloader(loader(), FIRST, shard_dims="y")
    assert len(spread) == 3
    for (x, y), start in zip(spread, (0, 4, 8), strict=True):
        np.testing.assert_array_equal(x.numpy(), X[start : start + 4])
        assert x.placements == y.placements == [Replicate(), Shard(0)]
    assert x._local_shape == [1, 4]  # the last batch has one row, in uneven pieces
    x, y = next(iter(shard_dataloader(loader(), FIRST)()))
    assert x.placements == [Replicate(), Replicate()]


def test_a_mesh_for_each_input_and_dicts():
    x, y = next(iter(shard_dataloader(loader(), [FIRST, SECOND], shard_dims=["x", 1])))
    assert (x.process_mesh, x.placements) == (FIRST, [Shard(0), Replicate()])
    assert (y.process_mesh, y.placements) == (SECOND, [Replicate(), Shard(0)])
    keys = ["inputs", "label"]
    spread = shard_dataloader(loader(True), [[FIRST, SECOND], SECOND], keys, "x", True, [[1], []])
    batch = next(iter(spread))
    assert list(batch) == keys
    first, second = batch["inputs"]
    assert first.process_mesh == FIRST
    assert not second.is_dist()  # dense_tensor_idx
    np.testing.assert_array_equal(second.numpy(), X[:4] * 2)
    assert batch["label"].process_mesh == SECOND
    only = next(iter(shard_dataloader(loader(True), FIRST, ["label"], dense_tensor_idx=[[0]])))
    assert list(only) == ["label"]
    assert not only["label"].is_dist()


def test_what_does_not_fit_is_told():
    for message, call in [
        ("takes an io.DataLoader, got list", lambda: shard_dataloader([1], FIRST)),
        ("needs shard_dims", lambda: shard_dataloader(loader(), FIRST, is_dataset_splitted=True)),
        ("meshes holds a int", lambda: shard_dataloader(loader(), [3])),
        ("1 input_keys .* for 2 meshes", lambda: shard_dataloader(loader(True), [FIRST, SECOND], ["label"])),
        ("3 shard_dims", lambda: shard_dataloader(loader(), [FIRST, SECOND], shard_dims=["x"] * 3)),
        ("batch_size 3 .* does not divide into 2", lambda: shard_dataloader(loader(False, 3), FIRST, shard_dims=0)),
        ("no dim 'z'", lambda: shard_dataloader(loader(), FIRST, shard_dims="z")),
        ("dense_tensor_idx=3", lambda: shard_dataloader(loader(), FIRST, dense_tensor_idx=3)),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    for message, spread in [
        ("'x'. are not in the batch", shard_dataloader(loader(True), FIRST, ["x"])),
        ("2 inputs and there are 3 meshes", shard_dataloader(loader(), [FIRST, SECOND, FIRST])),
        ("input 0 has 2 Tensors and 1 meshes", shard_dataloader(loader(True), [[FIRST], SECOND])),
    ]:
        with pytest.raises(DataError, match=message):
            next(iter(spread))
    assert paddle.distributed.get_mesh() is None


class OverMeshes(nn.Layer):
    """A product on each of two meshes whose dims have names of the user's own."""

    def __init__(self):
        super().__init__()
        paddle.seed(1)
        self.w0 = shard_tensor(self.create_parameter([4, 4]), FIRST, [Replicate(), Shard(1)])
        self.w1 = shard_tensor(self.create_parameter([4, 4]), SECOND, [Replicate(), Shard(0)])

    def forward(self, x):
        y = reshard(paddle.matmul(x, self.w0), SECOND, [Shard(0), Shard(1)])
        return paddle.matmul(y, self.w1).sum(1)


@pytest.mark.slow
def test_inputs_on_the_meshes_of_stages_train_eagerly_and_captured():
    losses = []
    for staged in (False, True):
        model = OverMeshes()
        optimizer = shard_optimizer(paddle.optimizer.AdamW(0.001, parameters=model.parameters()))
        loss = nn.MSELoss(reduction="sum")
        step = to_static(model, None, loss, optimizer) if staged else None
        curve = []
        for x, y in shard_dataloader(loader(), [FIRST, SECOND], shard_dims="x"):
            if step is not None:
                curve.append(float(step(x, y)))
                continue
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            optimizer.clear_grad()
            curve.append(float(value))
        losses.append(curve)
    np.testing.assert_allclose(losses[1], losses[0], rtol=64 * 6e-8)


def test_keys_of_inputs_want_batches_that_are_dicts():
    with pytest.raises(DataError, match=r"input_keys .* are for batches that are dicts, the loader gives a list"):
        next(iter(shard_dataloader(loader(), FIRST, input_keys=["a", "b"])))
