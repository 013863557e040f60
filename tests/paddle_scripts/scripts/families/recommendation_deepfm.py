"""DeepFM as a static program: sparse slots, first and second order, a tower, Adam, AUC, an inference model."""

import itertools
import os
import tempfile

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn, static
from paddle.nn.initializer import Assign

SLOTS, DENSE, FEATURES, DIM, LAYERS = 4, 3, 30, 4, (8, 6)


def weights(*shape, seed, scale=0.3):
    return paddle.ParamAttr(initializer=Assign(np.random.RandomState(seed).normal(0, scale, shape).astype("float32")))


class FM(nn.Layer):
    def __init__(self):
        super().__init__()
        one = weights(FEATURES, 1, seed=1)
        self.embedding_one = nn.Embedding(FEATURES, 1, padding_idx=0, sparse=True, weight_attr=one)
        self.embedding = nn.Embedding(
            FEATURES, DIM, padding_idx=0, sparse=True, weight_attr=weights(FEATURES, DIM, seed=2)
        )
        start = np.random.RandomState(3).normal(0, 0.3, [1, DENSE, DIM]).astype("float32")
        self.dense_w = self.create_parameter([1, DENSE, DIM], default_initializer=Assign(start))
        self.dense_w_one = self.create_parameter([DENSE], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, sparse_inputs, dense_inputs):
        sparse = paddle.concat(sparse_inputs, axis=1)
        first = paddle.sum(self.embedding_one(sparse), 1)
        first = first + paddle.sum(paddle.multiply(dense_inputs, self.dense_w_one), 1, keepdim=True)
        dense = paddle.multiply(paddle.unsqueeze(dense_inputs, axis=2), self.dense_w)
        features = paddle.concat([self.embedding(sparse), dense], axis=1)
        crossed = paddle.square(paddle.sum(features, 1)) - paddle.sum(paddle.square(features), 1)
        return first, 0.5 * paddle.sum(crossed, 1, keepdim=True), features


class DNN(nn.Layer):
    def __init__(self):
        super().__init__()
        sizes = [(SLOTS + DENSE) * DIM, *LAYERS, 1]
        self._mlp_layers = []
        for i, (wide, narrow) in enumerate(itertools.pairwise(sizes)):
            linear = nn.Linear(wide, narrow, weight_attr=weights(wide, narrow, seed=10 + i, scale=1.0 / np.sqrt(wide)))
            self.add_sublayer(f"linear_{i}", linear)
            self._mlp_layers.append(linear)
            if i < len(LAYERS):
                act = nn.ReLU()
                self.add_sublayer(f"act_{i}", act)
                self._mlp_layers.append(act)

    def forward(self, features):
        out = paddle.reshape(features, [-1, (SLOTS + DENSE) * DIM])
        for layer in self._mlp_layers:
            out = layer(out)
        return out


class StaticModel:
    def create_feeds(self):
        self.label = static.data("label", [None, 1], "int64")
        self.sparse = [static.data(f"C{i}", [None, 1], "int64") for i in range(1, SLOTS + 1)]
        self.dense = static.data("dense_input", [None, DENSE], "float32")
        return [self.label, *self.sparse, self.dense]

    def net(self):
        fm, dnn = FM(), DNN()
        first, second, features = fm(self.sparse, self.dense)
        self.predict = F.sigmoid(first + second + dnn(features))
        cost = F.log_loss(input=self.predict, label=paddle.cast(self.label, "float32"))
        self.cost = paddle.mean(x=cost)
        return {"cost": self.cost, "predict": self.predict}


def reader(batches, size=12):
    rng = np.random.RandomState(21)
    for _ in range(batches):
        sparse = rng.randint(0, FEATURES, [SLOTS, size, 1])
        dense = rng.rand(size, DENSE).astype("float32")
        label = (sparse[0] % 2 + dense.sum(1, keepdims=True) > 1.9).astype("int64")
        yield {"label": label, **{f"C{i + 1}": slot for i, slot in enumerate(sparse)}, "dense_input": dense}


paddle.enable_static()
main, startup = static.Program(), static.Program()
with static.program_guard(main, startup):
    model = StaticModel()
    feeds = model.create_feeds()
    metrics = model.net()
    optimizer = paddle.optimizer.Adam(learning_rate=0.05)
    optimizer.minimize(model.cost)
print("feeds", [feed.name for feed in feeds], model.predict.shape)
executor = static.Executor(paddle.CPUPlace())
auc = paddle.metric.Auc("ROC", num_thresholds=255)
executor.run(startup)
for epoch in range(2):
    auc.reset()
    for number, batch in enumerate(reader(3)):
        cost, predict = executor.run(main, feed=batch, fetch_list=list(metrics.values()))
        auc.update(np.concatenate([1 - predict, predict], 1), batch["label"])
        print(f"epoch {epoch} batch {number} cost {cost.item():.4f} auc {auc.accumulate():.3f}")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "deepfm")
    static.save_inference_model(path, feeds[1:], [model.predict], executor, program=main)
    program, names, targets = static.load_inference_model(path, executor)
    (served,) = executor.run(program, feed={name: batch[name] for name in names}, fetch_list=targets)
print("served", names, served.shape, f"{served.mean():.4f} {served.std():.4f}")
paddle.disable_static()
