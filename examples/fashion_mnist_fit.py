"""Train LeNet on Fashion-MNIST with Model.fit, and print its test accuracy.

    python examples/fashion_mnist_fit.py

Each batch runs as one compiled program: forward, backward and the optimizer's step.
"""

import argparse

import polyreme as paddle
from polyreme.vision.transforms import Compose, Normalize, ToTensor


def main():
    """Train, then test."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=6000, help="how many images to train on")
    arguments = parser.parse_args()

    paddle.seed(1)
    transform = Compose([ToTensor(), Normalize([0.5], [0.5])])
    train = paddle.io.Subset(paddle.vision.datasets.FashionMNIST(transform=transform), range(arguments.images))
    test = paddle.vision.datasets.FashionMNIST(mode="test", transform=transform)

    network = paddle.vision.models.LeNet()
    model = paddle.Model(network)
    model.prepare(
        paddle.optimizer.Adam(learning_rate=2e-3, parameters=model.parameters()),
        paddle.nn.CrossEntropyLoss(),
        paddle.metric.Accuracy(),
    )
    model.fit(train, test, batch_size=64, epochs=arguments.epochs, log_freq=30, verbose=1, drop_last=True)
    found = model.evaluate(test, batch_size=200, verbose=0)
    print(f"test accuracy {found['acc']:.3f} on {len(test)} images")


if __name__ == "__main__":
    main()
