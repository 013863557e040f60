"""LeNet and the ResNets: shapes, sizes, gradients, and a captured step equal to an eager one."""

import numpy as np
import pytest

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DataError
from polyreme.jit import to_static
from polyreme.nn import AdaptiveAvgPool2D, BatchNorm2D, Conv2D, CrossEntropyLoss, Flatten, Linear, Sequential
from polyreme.optimizer import Momentum
from polyreme.vision import models
from polyreme.vision.models import BasicBlock, BottleneckBlock, LeNet, ResNet

# trainable parameters as published with the papers' reference networks, 1,000 classes
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "wide_resnet50_2": 68_883_240,
    "wide_resnet101_2": 126_886_696,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x4d": 44_177_704,
    "resnext101_64x4d": 83_455_272,
}


def trainable(network):
    return sum(p.size for p in network.parameters() if not p.stop_gradient)


def images(*shape, seed=0):
    return to_tensor(np.random.default_rng(seed).standard_normal(shape).astype("float32"))


def resnet():
    return ResNet(BasicBlock, 18, num_classes=4)


def blocks():
    """One block of each kind: what a ResNet is made of, quick to compile."""
    down = Sequential(Conv2D(3, 8, 1, stride=2, bias_attr=False), BatchNorm2D(8))
    wide = Sequential(Conv2D(8, 16, 1, bias_attr=False), BatchNorm2D(16))
    first, second = BasicBlock(3, 8, 2, down), BottleneckBlock(8, 4, 1, wide, groups=2)
    return Sequential(first, second, AdaptiveAvgPool2D(1), Flatten(), Linear(16, 4))


NETWORKS = {"LeNet": (LeNet, (4, 1, 28, 28)), "blocks": (blocks, (4, 3, 16, 16)), "resnet": (resnet, (4, 3, 32, 32))}
every_network = pytest.mark.parametrize(
    "make",
    [pytest.param(n, marks=pytest.mark.slow if n == "resnet" else ()) for n in ("LeNet", "blocks", "resnet")],
)


def test_lenet_has_the_shapes_and_parameters_of_its_layers():
    network = LeNet()
    assert network(images(2, 1, 28, 28)).shape == [2, 10]
    convolutions = (6 * 9 + 6) + (16 * 6 * 25 + 16)
    linears = (400 * 120 + 120) + (120 * 84 + 84) + (84 * 10 + 10)
    assert trainable(network) == convolutions + linears
    assert LeNet(num_classes=0)(images(2, 1, 28, 28)).shape == [2, 16, 5, 5]


def test_names_of_parameters(abstract):
    assert list(LeNet().state_dict())[:2] == ["features.0.weight", "features.0.bias"]
    names = list(resnet().state_dict())
    assert names[:5] == ["conv1.weight", "bn1.weight", "bn1.bias", "bn1._mean", "bn1._variance"]
    assert "layer2.0.downsample.0.weight" in names
    assert "layer1.0.downsample.0.weight" not in names


@pytest.mark.parametrize("name", PUBLISHED)
def test_number_of_parameters_is_the_published_one(name, abstract):
    network = getattr(models, name)()
    assert sum(int(np.prod(p.shape)) for p in network.parameters() if not p.stop_gradient) == PUBLISHED[name]


def test_resnet_output_shapes(abstract):
    x = abstract(1, 3, 64, 64)
    assert list(ResNet(BasicBlock, 18, num_classes=7)(x).shape) == [1, 7]
    # a stem of stride 4, then three stages of stride 2
    assert list(ResNet(BasicBlock, 18, num_classes=0, with_pool=False)(x).shape) == [1, 512, 2, 2]
    assert list(ResNet(BottleneckBlock, 50, num_classes=0)(x).shape) == [1, 2048, 1, 1]


@pytest.mark.one_in(2)
@every_network
def test_gradient_reaches_all_parameters(make):
    network, x = NETWORKS[make][0](), images(*NETWORKS[make][1])
    CrossEntropyLoss()(network(x), to_tensor(np.array([0, 1, 2, 3]))).backward()
    trained = [(name, p) for name, p in network.named_parameters() if p.trainable]
    assert [name for name, p in trained if p.grad is None or not np.abs(p.grad.numpy()).max() > 0] == []


def step_of(network):
    optimizer = Momentum(0.01, 0.9, parameters=network.parameters())
    loss = CrossEntropyLoss()

    def step(x, y):
        value = loss(network(x), y)
        value.backward()
        optimizer.step()
        optimizer.clear_grad()
        return value

    return step


@pytest.mark.slow
@every_network
def test_captured_steps_equal_eager_ones(make):
    # in float64, because batch norm over few samples magnifies rounding; what is left of it stays far below float32's
    eager, captured = NETWORKS[make][0]().astype("float64"), NETWORKS[make][0]().astype("float64")
    captured.set_state_dict({k: v.numpy() for k, v in eager.state_dict().items()})
    x = images(*NETWORKS[make][1]).astype("float64")
    y = to_tensor(np.array([0, 1, 2, 3]))
    one, other = step_of(eager), to_static(step_of(captured))
    for _ in range(2):
        assert float(one(x, y)) == pytest.approx(float(other(x, y)), rel=2.0**-23)
    for name, tensor in eager.state_dict().items():
        a, b = tensor.numpy(), captured.state_dict()[name].numpy()
        np.testing.assert_allclose(b, a, rtol=0, atol=2.0**-23 * max(1.0, np.abs(a).max()), err_msg=name)


def test_what_cannot_be_had_is_refused():
    with pytest.raises(DataError, match="no weights come with polyreme"):
        models.resnet50(pretrained=True)
    with pytest.raises(ConfigError, match="ResNet: depth=20"):
        ResNet(BasicBlock, 20)
    with pytest.raises(ConfigError, match="only a BottleneckBlock can be grouped or wide"):
        ResNet(BasicBlock, 18, groups=2)


def test_subclasses_of_resnet_make_stages_of_their_own_blocks():
    class Block(BottleneckBlock):
        def __init__(self, inplanes, planes, *rest, **settings):
            super().__init__(inplanes, planes, *rest, **settings)
            self.conv1 = Conv2D(inplanes, planes, 1)

    class Dilated(ResNet):
        def __init__(self, block, depth):
            super().__init__(BasicBlock, depth, 7, False)  # num_classes and with_pool, as before there was a width
            self.inplanes = 4
            self.layer4 = self._make_layer(block, 2, 2, stride=2, dilate=True)

    net = Dilated(Block, 18)
    assert (net.base_width, net.num_classes, net.with_pool) == (64, 7, False)
    first, second = net.layer4
    assert first.conv2._stride == second.conv2._stride == [1, 1]
    assert net.dilation == 2
    assert first.conv1.bias is not None
    assert len(net.layer4) == 2
    third = Block(8, 2, dilation=3)
    assert third.conv2._dilation == [3, 3]
    assert third(to_tensor(np.ones((1, 8, 5, 5), "float32"))).shape == [1, 8, 5, 5]
    with pytest.raises(ConfigError, match="dilation=2; only a BottleneckBlock"):
        BasicBlock(8, 8, dilation=2)
