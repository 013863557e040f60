"""Trains and evaluates with paddle.Model, metrics and a callback."""

import numpy as np
import paddle
from paddle.io import Dataset
from paddle.metric import Accuracy


class Blobs(Dataset):
    def __init__(self, count):
        rng = np.random.RandomState(7)
        self.labels = rng.randint(0, 3, [count, 1]).astype("int64")
        centres = np.eye(3, 4, dtype="float32") * 4
        self.points = (centres[self.labels[:, 0]] + rng.randn(count, 4)).astype("float32")

    def __getitem__(self, index):
        return self.points[index], self.labels[index]

    def __len__(self):
        return len(self.points)


class Losses(paddle.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "loss", f"{float(np.ravel(logs['loss'])[0]):.3f}", "acc", f"{float(logs['acc']):.3f}")


net = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 3))
rng = np.random.RandomState(1)
for parameter in net.parameters():
    parameter.set_value(rng.uniform(-0.4, 0.4, parameter.shape).astype("float32"))
model = paddle.Model(net)
model.prepare(paddle.optimizer.Adam(0.01, parameters=model.parameters()), paddle.nn.CrossEntropyLoss(), Accuracy())
data = Blobs(96)
model.fit(data, epochs=4, batch_size=32, shuffle=False, verbose=0, callbacks=[Losses()])
result = model.evaluate(data, batch_size=32, verbose=0)
print("evaluated", f"{float(result['acc']):.3f}")
predicted = model.predict(data, batch_size=32, stack_outputs=True, verbose=0)[0]
print("predicted", predicted.shape, (predicted.argmax(1) == data.labels[:, 0]).mean())
