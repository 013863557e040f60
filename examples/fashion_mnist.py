"""Train a small convolutional network on Fashion-MNIST, in a loop written out, and print its test accuracy.

    python examples/fashion_mnist.py

Everything after the first import is plain Paddle: with `import paddle` in its place the same program runs there.
"""

import argparse
from pathlib import Path

import polyreme as paddle

DATA = Path(__file__).resolve().parent.parent / "data" / "fashion_mnist"


class Net(paddle.nn.Layer):
    """Two convolutions and two linear layers: images [batch, 1, 28, 28] -> scores [batch, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = paddle.nn.Conv2D(1, 16, 3, padding=1)
        self.conv2 = paddle.nn.Conv2D(16, 32, 3, padding=1)
        self.pool = paddle.nn.MaxPool2D(2)
        self.hidden = paddle.nn.Linear(32 * 7 * 7, 128)
        self.dropout = paddle.nn.Dropout(0.2)
        self.scores = paddle.nn.Linear(128, 10)

    def forward(self, x):
        x = self.pool(paddle.nn.functional.relu(self.conv1(x)))
        x = self.pool(paddle.nn.functional.relu(self.conv2(x)))
        x = paddle.nn.functional.relu(self.hidden(x.flatten(1)))
        return self.scores(self.dropout(x))


def dataset(mode, transform):
    """The images of one part, "train" or "test"."""
    part = "train" if mode == "train" else "t10k"
    return paddle.vision.datasets.FashionMNIST(
        str(DATA / f"{part}-images-idx3-ubyte.gz"),
        str(DATA / f"{part}-labels-idx1-ubyte.gz"),
        mode=mode,
        transform=transform,
    )


def main():
    """Train, then test."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=6000, help="how many images to train on")
    arguments = parser.parse_args()

    paddle.seed(1)
    transform = paddle.vision.transforms.Compose(
        [paddle.vision.transforms.ToTensor(), paddle.vision.transforms.Normalize([0.5], [0.5])]
    )
    train = paddle.io.Subset(dataset("train", transform), range(arguments.images))
    train_loader = paddle.io.DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    test_loader = paddle.io.DataLoader(dataset("test", transform), batch_size=200)

    net = paddle.jit.to_static(Net())
    loss_fn = paddle.nn.CrossEntropyLoss()
    opt = paddle.optimizer.AdamW(learning_rate=1e-3, parameters=net.parameters())

    for epoch in range(arguments.epochs):
        net.train()
        for step, (images, labels) in enumerate(train_loader):
            loss = loss_fn(net(images), labels)
            loss.backward()
            opt.step()
            opt.clear_grad()
            if step % 20 == 0:
                print(
                    f"epoch {epoch + 1}/{arguments.epochs}  step {step + 1}/{len(train_loader)}  loss {float(loss):.4f}"
                )

    net.eval()
    correct = total = 0
    with paddle.no_grad():
        for images, labels in test_loader:
            best = net(images).argmax(axis=1)
            correct += int((best == labels.flatten()).astype("int64").sum())
            total += labels.shape[0]
    print(f"test accuracy {correct / total:.3f} on {total} images")


if __name__ == "__main__":
    main()
