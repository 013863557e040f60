"""The small training steps that mlp_step.py and lenet.py time: networks, batches and steps for each framework."""

import numpy as np

BATCH = 64
LEARNING_RATE = 1e-3
# the loss is a mean of 64 numbers of about 2.3, each from sums of up to 784 float32 products of size below 1
TOLERANCE = 2.0**-23 * 784**0.5 * 2.3


def batch(shape=(784,)):
    """Images [64, *shape] float32 and labels [64] int64."""
    rng = np.random.default_rng(0)
    return rng.random((BATCH, *shape), "float32"), rng.integers(0, 10, BATCH)


def weights(shapes):
    """Uniform in +-1/sqrt(inputs), as float32, by index; biases (one dim) are 0."""
    rng = np.random.default_rng(1)
    parameters = []
    for shape in shapes:
        if len(shape) == 1:
            parameters.append(np.zeros(shape, np.float32))
            continue
        inputs = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
        parameters.append((rng.uniform(-1, 1, shape) / np.sqrt(inputs)).astype(np.float32))
    return parameters


def paddle_mlp(paddle):
    """The network in polyreme or PaddlePaddle."""
    nn = paddle.nn
    return filled_paddle(nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)))


def filled_paddle(network):
    """The network with the workload's weights."""
    params = list(network.parameters())
    for param, array in zip(params, weights([tuple(p.shape) for p in params]), strict=True):
        param.set_value(array)
    return network


def paddle_step(paddle, network, optimizer, data, captured=False):
    """-> one step, imperative or (in polyreme) captured."""
    loss_fn = paddle.nn.CrossEntropyLoss()
    opt = getattr(paddle.optimizer, optimizer)(LEARNING_RATE, parameters=network.parameters())
    x, y = (paddle.to_tensor(a) for a in data)

    def step(x, y):
        loss = loss_fn(network(x), y)
        loss.backward()
        opt.step()
        opt.clear_grad()
        return loss

    run = paddle.jit.to_static(step) if captured else step
    return lambda: float(run(x, y))


def torch_mlp():
    """The network in PyTorch."""
    import torch

    return filled_torch(torch.nn.Sequential(torch.nn.Linear(784, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10)))


def filled_torch(network):
    """The network with the workload's weights; PyTorch keeps a linear layer's transposed."""
    import torch

    params = list(network.parameters())
    shapes = [tuple(p.shape)[::-1] if p.ndim == 2 else tuple(p.shape) for p in params]
    with torch.no_grad():
        for param, array in zip(params, weights(shapes), strict=True):
            param.copy_(torch.from_numpy(array.T.copy() if param.ndim == 2 else array))
    return network


def torch_step(network, optimizer, data):
    """-> one eager step, with PyTorch's fused optimizer."""
    import torch

    loss_fn = torch.nn.CrossEntropyLoss()
    opt = getattr(torch.optim, optimizer)(network.parameters(), lr=LEARNING_RATE, fused=True)
    x, y = (torch.from_numpy(a) for a in data)

    def step():
        loss = loss_fn(network(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    return step
