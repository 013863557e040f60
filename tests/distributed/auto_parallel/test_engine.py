"""Engine: fit, evaluate, predict, run, save and load of plain models, against Model on one device."""

import logging
import os

import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.callbacks import Callback, EarlyStopping
from polyreme.distributed import ProcessMesh, Replicate, Shard, reshard, shard_dataloader, shard_tensor
from polyreme.distributed.fleet import auto
from polyreme.errors import CheckpointError, ConfigError, DataError, DTypeError, ProgramError
from polyreme.io import DataLoader, IterableDataset, TensorDataset
from polyreme.metric import Accuracy
from polyreme.nn import functional as F
from polyreme.planner import cluster_of_kind
from polyreme.static import InputSpec

X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, (20, 1))
DATA = TensorDataset([paddle.to_tensor(X), paddle.to_tensor(Y)])
# six steps of float32 sums of at most 16 terms, of numbers of size about 1, in another order: 16 eps each
NEAR = {"rtol": 6 * 16 * 1.2e-7}

HALF_WAY = {"gradient_merge": {"enable": True, "k_steps": 2}, "amp": {"enable": True}}


def network(seed=3):
    paddle.seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def engine(strategy=None, layer=None, rate=0.01):
    layer = layer or network()
    optimizer = paddle.optimizer.Adam(rate, parameters=layer.parameters())
    return auto.Engine(
        layer, nn.CrossEntropyLoss(), optimizer, Accuracy(), strategy=strategy and auto.Strategy(strategy)
    )


class Losses(Callback):
    """Keeps the loss of every batch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, step, logs=None):
        self.found.append(np.ravel(logs["loss"])[0])


@pytest.fixture(scope="module")
def one_device():
    """Model.fit's losses of two epochs of 20 samples by 8, and its evaluation."""
    layer = network()
    model = paddle.Model(layer)
    model.prepare(paddle.optimizer.Adam(0.01, parameters=layer.parameters()), nn.CrossEntropyLoss(), Accuracy())
    losses = Losses()
    model.fit(DATA, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[losses])
    return (
        losses.found,
        model.evaluate(DATA, batch_size=8, verbose=0),
        model.predict(DATA, batch_size=20, verbose=0)[0][0],
    )


def test_plain_code_on_eight_devices_equals_model_on_one(one_device, tmp_path, capsys, caplog):
    """The last batch of each epoch has 4 rows, which 8 devices do not divide; every sample counts all the same."""
    batches, evaluated, predicted = one_device
    trainer, losses = engine(), Losses()
    with caplog.at_level(logging.WARNING, "polyreme.distributed.auto_parallel"):
        history = trainer.fit(
            DATA, batch_size=8, epochs=2, valid_data=DATA, valid_freq=2, callbacks=[losses], save_dir=str(tmp_path),
            save_freq=2, verbose=2, log_freq=3,
        )  # fmt: skip
    np.testing.assert_allclose(losses.found, batches, **NEAR)
    assert [r.getMessage()[:30] for r in caplog.records] == ["a batch of 4 rows does not div"]
    assert set(history.history) == {"loss", "acc", "lr", "val_loss", "val_acc"}
    assert (len(history.history["loss"]), len(history.history["val_loss"]), history.epoch) == (2, 1, [0, 1])
    np.testing.assert_allclose(history.history["val_loss"], evaluated["loss"], **NEAR)
    found = trainer.evaluate(DATA, batch_size=8, verbose=0)
    np.testing.assert_allclose([found["loss"], found["acc"]], [*evaluated["loss"], evaluated["acc"]], **NEAR)
    outputs = trainer.predict(DATA, batch_size=8, verbose=0)
    assert [len(batch) for batch in outputs] == [1, 1, 1]
    # outputs differ as weights do: by at most a step's rounding each, of products of 8 terms
    np.testing.assert_allclose(np.concatenate([b[0] for b in outputs]), predicted, rtol=1e-4, atol=1e-5)
    assert sorted(os.listdir(tmp_path)) == ["0.train", "final.train"]
    assert "val" not in capsys.readouterr().out.split("Epoch 2/2")[0]
    assert trainer.history is history
    assert str(trainer.plan.mesh) == "dp8"


def test_training_goes_on_from_a_save_on_another_mesh(tmp_path):
    trainer = engine(HALF_WAY)
    trainer.fit(DATA, batch_size=8, verbose=0)  # three batches: one update, and half way to the next
    path = str(tmp_path / "run" / "model")
    trainer.save(path)
    assert sorted(os.listdir(tmp_path / "run")) == ["model.train"]
    want = trainer.fit(DATA, batch_size=8, verbose=0).history
    other = engine({**HALF_WAY, "sharding": {"enable": True, "stage": 3}}, network(seed=9))
    params, state = other.load(path)
    assert set(params) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {"moment1/0.weight", "moment2/2.bias"} <= set(state)
    found = other.fit(DATA, batch_size=8, verbose=0).history
    # float16 products: 2^-10 of each of two layers
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=2 * 2**-10)
    assert str(other.plan.mesh) == "sharding8"
    plain = engine()
    with pytest.raises(CheckpointError, match=r"model.train lacks .* give strict=False"):
        plain.load(path)
    plain.load(path, load_optimizer=False)
    np.testing.assert_array_equal(plain.model.network[0].weight.numpy().shape, (4, 8))
    with pytest.raises(CheckpointError, match="there is no folder"):
        plain.load(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="names a folder; give FOLDER/NAME"):
        plain.save(f"{tmp_path}/")


def test_a_batch_at_a_time_and_an_artefact(tmp_path):
    trainer = engine()
    with pytest.raises(ConfigError, match=r"training=False exports for inference.*call prepare"):
        trainer.save(str(tmp_path / "net"), training=False)
    trainer.prepare(InputSpec([None, 4], "float32", "x"), InputSpec([None, 1], "int64", "y"), mode="train")
    loader = trainer.dataloader(DATA, batch_size=8, epochs=2, steps_per_epoch=3, sample_split=1)
    assert len(loader) == 4  # drop_last
    found = [trainer.run(batch) for batch in loader]
    assert found[2]["loss"] < found[0]["loss"]  # the first batch again
    assert set(found[0]) == {"loss", "acc"}
    assert found[0]["loss"].shape == ()
    by_name = trainer.run(feed={"y": Y[:8], "x": X[:8]}, mode="eval", fetch_list=["outputs"])
    trainer.to_mode("predict")
    (logits,) = trainer.run({"x": X[:8]})["outputs"]
    np.testing.assert_array_equal(logits, by_name["outputs"][0])
    trainer.save(str(tmp_path / "net"), training=False)
    assert sorted(os.listdir(tmp_path)) == ["net.json", "net.safetensors", "net.stablehlo"]
    np.testing.assert_allclose(
        paddle.jit.load(str(tmp_path / "net"))(paddle.to_tensor(X[:8])).numpy(), logits, rtol=1e-5
    )
    assert "main" in trainer.main_program.as_text()
    with pytest.raises(DTypeError, match="input 0 is specified as float32, the batch has float64"):
        trainer.run([X.astype(np.float64)])


class Stream(IterableDataset):
    """The samples without a length."""

    def __iter__(self):
        yield from zip(X, Y, strict=True)


def test_loaders_of_every_kind():
    trainer = engine()
    whole = trainer.evaluate(DATA, batch_size=20, verbose=0)
    mesh = ProcessMesh(list(range(4)), ["dp"])
    spread = shard_dataloader(DataLoader(DATA, batch_size=8), mesh, shard_dims="dp")
    layer = network()
    layer[0].weight = shard_tensor(layer[0].weight, mesh, [Replicate()])
    on_mesh = engine(layer=layer)
    streamed = trainer.dataloader_from_generator(Stream(), batch_size=8, drop_last=False, mode="eval")
    for each, data in ((trainer, DataLoader(DATA, batch_size=8)), (trainer, streamed), (on_mesh, spread)):
        found = each.evaluate(data, verbose=0)
        np.testing.assert_allclose([found["loss"], found["acc"]], [whole["loss"], whole["acc"]], **NEAR)
    assert str(on_mesh.plan.mesh) == "dp4"


class Noted(nn.Layer):
    """Dropout, running statistics and a value that is fetched."""

    def __init__(self, mesh=None):
        super().__init__()
        paddle.seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1D(8), nn.Linear(8, 3))
        if mesh is not None:
            self.layers[0].weight = shard_tensor(self.layers[0].weight, mesh, [Replicate()])

    def forward(self, x):
        out = self.layers(x)
        auto.fetch(out.square().sum(), "total")
        return out


def test_two_engines_share_one_generator_over_different_devices():
    """Each draws from it where it runs; statistics of the global batch are those of one device."""
    eight, four = engine(layer=Noted()), engine(layer=Noted(ProcessMesh([0, 1, 2, 3], ["dp"])))
    one = paddle.Model(Noted())
    one.prepare(paddle.optimizer.Adam(0.01, parameters=one.parameters()), nn.CrossEntropyLoss())
    paddle.seed(5)
    (want,) = one.train_batch([X[:8]], [Y[:8]])
    paddle.seed(5)
    found = eight.run([X[:8], Y[:8]], fetch_list=["outputs"])
    np.testing.assert_allclose(found["loss"], want, **NEAR)
    means = [each.layers[2]._mean.numpy() for each in (eight.model.network, one.network)]
    np.testing.assert_allclose(*means, **NEAR)
    np.testing.assert_allclose(found["fetches"]["total"], (found["outputs"][0] ** 2).sum(), rtol=24 * 1.2e-7)
    drawn = [each.run([X[:8], Y[:8]])["loss"] for each in (four, eight)]
    assert np.isfinite(drawn).all()


def test_the_planner_chooses_and_predicts():
    trainer = auto.Engine(
        layer := network(),
        nn.CrossEntropyLoss(),
        paddle.optimizer.Adam(0.01, parameters=layer.parameters()),
        strategy="auto",
    )
    with pytest.raises(ConfigError, match="the model is not in its place yet"):
        _ = trainer.plan
    specs = InputSpec([8, 4], "float32"), InputSpec([8, 1], "int64")
    with pytest.raises(ConfigError, match="the plan is chosen with the first batch"):
        trainer.cost(*specs)
    losses = [trainer.run([X[:8], Y[:8]])["loss"] for _ in range(2)]
    plain = engine()
    np.testing.assert_allclose(losses, [plain.run([X[:8], Y[:8]])["loss"] for _ in range(2)], **NEAR)
    assert trainer.plan.mesh.size == 8
    assert "plans, best first" in str(trainer.chosen)
    for each in (trainer, plain):
        cost = each.cost(*specs)
        assert cost.step_seconds > 0
        assert cost.fits
    first = engine(strategy={"auto_mode": "full"})
    predicted = first.predict(DATA, batch_size=8, verbose=0)  # before there was a label to plan for
    np.testing.assert_allclose(predicted[0][0], engine().predict(DATA, batch_size=8, verbose=0)[0][0], rtol=1e-5)
    a100 = cluster_of_kind("a100-40g", 8)
    other = auto.Engine(network(), nn.CrossEntropyLoss(), cluster=a100).cost(*specs)
    assert other.capacity == a100.device.memory * a100.device.usable
    weights = 4 * (4 * 8 + 8 + 8 * 3 + 3)  # bytes, of which data parallel keeps a copy on each device
    assert cost.memory.parameters == weights
    with pytest.raises(ConfigError, match="leave the rows of a batch open"):
        plain.cost(InputSpec([None, 4], "float32"), specs[1])
    with pytest.raises(ConfigError, match="mode='eval'; the planner predicts training steps"):
        plain.cost(*specs, mode="eval")
    layer = network()
    layer[0].weight = shard_tensor(layer[0].weight, ProcessMesh(list(range(8)), ["dp"]), [Replicate()])
    with pytest.raises(ConfigError, match="strategy 'auto': Sequential is marked on the mesh"):
        auto.Engine(layer, strategy="auto").predict(DATA, batch_size=8, verbose=0)


class Staged(nn.Layer):
    """Two layers, on two meshes if there are."""

    def __init__(self, meshes=None):
        super().__init__()
        paddle.seed(3)
        self.first, self.second, self.meshes = nn.Linear(4, 8), nn.Linear(8, 3), meshes
        for layer, mesh in zip((self.first, self.second), meshes or (), strict=False):
            layer.weight = shard_tensor(layer.weight, mesh, [Replicate()])
            layer.bias = shard_tensor(layer.bias, mesh, [Replicate()])

    def forward(self, x):
        x = F.relu(self.first(x))
        if self.meshes:
            x = reshard(x, self.meshes[1], [Shard(0)])
        return self.second(x)


@pytest.mark.parametrize("marked", [False, True])
def test_pipeline_stages_equal_one_device(one_device, tmp_path, marked):
    """A model cut by itself, or by the meshes of its layers, under 1F1B; the last batch has one microbatch less."""
    meshes = [ProcessMesh([0, 1, 2, 3], ["dp"]), ProcessMesh([4, 5, 6, 7], ["dp"])] if marked else None
    strategy = {"pipeline": {"enable": True, "pp_degree": 2, "micro_batch_size": 1}}
    trainer, losses = engine(strategy, Staged(meshes)), Losses()
    history = trainer.fit(DATA, batch_size=8, epochs=2, callbacks=[losses], valid_data=DATA, verbose=0).history
    np.testing.assert_allclose(losses.found, one_device[0], **NEAR)
    np.testing.assert_allclose(history["val_loss"][-1], one_device[1]["loss"][0], **NEAR)
    assert history["val_acc"][-1] == one_device[1]["acc"]
    assert (trainer.plan.mesh.pp, trainer.plan.mesh.dp, trainer.plan.schedule) == (2, 4, "1F1B")
    if marked:
        return
    ready = engine(strategy, Staged())
    ready.prepare(InputSpec([8, 4], "float32"), InputSpec([8, 1], "int64"), mode="train")
    assert ready.plan == trainer.plan
    trainer.save(str(tmp_path / "two"))
    plain = engine(layer=Staged())
    plain.load(str(tmp_path / "two"))
    outputs = [each.predict(DATA, batch_size=20, steps=1, verbose=0)[0][0] for each in (trainer, plain)]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="the train step of a pipeline is a program for each stage"):
        trainer.get_dist_main_program("train")


class Dropping(Staged):
    """Drops whatever the mode."""

    def forward(self, x):
        return self.second(F.dropout(self.first(F.dropout(x, 0.5)), 0.5))


# one microbatch is the first of two
@pytest.mark.slow
@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("count", [1, 2])
def test_stages_draw_the_random_numbers_of_one_program(count):
    """The rate is 0, so that losses of a batch differ by what was dropped alone."""
    results = []
    for degree in (1, 2):
        strategy = {"pipeline": {"enable": True, "pp_degree": degree, "accumulate_steps": count}}
        made = engine(strategy, Dropping(), rate=0.0)
        paddle.seed(5)
        losses = [float(made.run([X[:16], Y[:16]], mode=mode)["loss"]) for mode in ("train", "eval", "train")]
        (outputs,) = made.run([X[:16]], mode="predict")["outputs"]
        results.append((losses, outputs, paddle.get_rng_state()[0]))
    (losses, outputs, key), (other_losses, other_outputs, other_key) = results
    assert len(set(losses)) == 3
    np.testing.assert_allclose(losses, other_losses, **NEAR)
    np.testing.assert_allclose(outputs, other_outputs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(key, other_key)


class Named(Staged):
    """Outputs by name: rows, a mean of them, and nothing."""

    def forward(self, x):
        scores = super().forward(x)
        return {"scores": scores, "mean": scores.mean(), "more": (scores * 2, None)}


def test_outputs_of_any_structure():
    pipeline = {"pipeline": {"enable": True, "pp_degree": 2, "accumulate_steps": 2}}
    predictions = [engine(s, Named()).predict(DATA, batch_size=8, steps=1, verbose=0)[0][0] for s in (None, pipeline)]
    for out in predictions:
        np.testing.assert_array_equal(out["more"][0], out["scores"] * 2)
        np.testing.assert_allclose(out["mean"], out["scores"].mean(), rtol=1e-5)
        assert out["more"][1] is None
    np.testing.assert_allclose(predictions[0]["scores"], predictions[1]["scores"], rtol=1e-5, atol=1e-6)


def test_a_loss_with_parameters_has_no_stage():
    layer, loss = Staged(), nn.Sequential(nn.Linear(3, 1))
    optimizer = paddle.optimizer.SGD(0.1, parameters=[*layer.parameters(), *loss.parameters()])
    made = auto.Engine(layer, loss, optimizer, strategy=auto.Strategy({"pipeline": {"enable": True, "pp_degree": 2}}))
    with pytest.raises(ConfigError, match="the loss Sequential has parameters to train, which no stage"):
        made.run([X[:8]], mode="train")


def test_callbacks_stop_and_limits_limit():
    trainer = engine(rate=0.0)
    history = trainer.fit(
        DATA,
        batch_size=10,
        epochs=5,
        steps_per_epoch=1,
        valid_data=DATA,
        callbacks=[EarlyStopping(verbose=0)],
        verbose=0,
    )
    assert history.epoch == [0, 1]  # the second evaluation is no better
    assert len(trainer.predict(DATA, batch_size=5, steps=2, verbose=0)) == 2


def test_what_an_engine_refuses():
    layer = network()
    trainer = engine(layer=layer)
    with pytest.raises(TypeError, match="Engine takes a Layer, got NoneType"):
        auto.Engine()
    with pytest.raises(TypeError, match=r"cluster is a planner.Cluster, got str"):
        auto.Engine(layer, cluster="v5e")
    with pytest.raises(ConfigError, match=r"nvprof_range=\[1, 2\]; nothing is profiled here"):
        trainer.fit(DATA, nvprof_range=[1, 2])
    with pytest.raises(ConfigError, match=r"Engine.fit: epochs=0; give a whole number of at least 1"):
        trainer.fit(DATA, epochs=0)
    with pytest.raises(ConfigError, match=r"Engine.fit: data is a int; give a Dataset or a DataLoader"):
        trainer.fit(3)
    with pytest.raises(ConfigError, match="collate_fn is for a Dataset"):
        trainer.evaluate(DataLoader(DATA), collate_fn=list)
    with pytest.raises(DataError, match="train_data gave no batch"):
        trainer.fit(iter([]), verbose=0)
    with pytest.raises(DataError, match="the evaluation data gave no batch"):
        trainer.evaluate(iter([]), verbose=0)
    with pytest.raises(ConfigError, match="mode 'train' needs optimizer"):
        auto.Engine(layer, nn.CrossEntropyLoss()).fit(DATA)
    with pytest.raises(ConfigError, match="mode 'eval' needs loss"):
        auto.Engine(layer).evaluate(DATA)
    with pytest.raises(ConfigError, match=r"give one batch, as data=\[inputs and labels\] or feed"):
        trainer.run()
    with pytest.raises(ConfigError, match="fetch_list has 'logits'; give any of 'outputs', 'loss', 'acc'"):
        trainer.run([X, Y], fetch_list=["logits"])
    with pytest.raises(ConfigError, match=r"a batch by names \(x\) needs named specs"):
        trainer.run({"x": X})
    with pytest.raises(ProgramError, match="main_program belong to static Programs"):
        trainer.prepare(main_program=3)
    with pytest.raises(ConfigError, match="places; a batch goes to the devices of the model"):
        trainer.dataloader(DATA, places=["cpu"])
    with pytest.raises(ConfigError, match="iterable=False"):
        trainer.dataloader_from_generator(DATA, iterable=False)
    with pytest.raises(ProgramError, match="no startup program"):
        _ = trainer.startup_program
    trainer.prepare(InputSpec([None, 4], "float32", "x"), InputSpec([None, 1], "int64", "y"))
    with pytest.raises(ConfigError, match=r"a batch by names has \['x', 'z'\]; the specs are \['x', 'y'\]"):
        trainer.run({"x": X, "z": Y})
    with pytest.raises(ConfigError, match="holds a int; give InputSpec"):
        trainer.prepare(inputs_spec=[3])
