"""Families of networks: parameters and shapes without computing, weights from files, a vision transformer by NumPy."""

import hashlib
import math

import numpy as np
import pytest

import polyreme
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError, ConfigError, DataError, ShapeError
from polyreme.jit import to_static
from polyreme.vision import models
from polyreme.vision.models import vgg
from polyreme.vision.models.blocks import divisible
from polyreme.vision.models.weights import maker

# trainable parameters, entries of the state_dict, and a digest of its names and shapes (see digest), all of
# PaddlePaddle 3.3.1: paddle.vision.models.NAME().state_dict(); NAME_bn is NAME(batch_norm=True)
PADDLE = {
    "alexnet": (61_100_840, 16, "b28013d3a7d6"),
    "vgg11": (132_863_336, 22, "ba8cc2e08701"),
    "vgg11_bn": (132_868_840, 54, "7c6fdc99248d"),
    "densenet121": (7_978_856, 606, "f87323fb3b93"),
    "densenet161": (28_681_000, 806, "0eb8c6573ff1"),
    "googlenet": (11_535_736, 69, "0078130e26a0"),
    "inception_v3": (23_834_568, 472, "bb82a2a7e40b"),
    "mobilenet_v1": (4_231_976, 137, "ae9e6fded8f4"),
    "mobilenet_v2": (3_504_872, 262, "cf2e242c3f17"),
    "mobilenet_v3_small": (2_542_856, 210, "0c8fbff51bd7"),
    "mobilenet_v3_large": (5_483_032, 266, "21f1f9102993"),
    "shufflenet_v2_x0_25": (603_688, 282, "593242110d9b"),
    "shufflenet_v2_x1_0": (2_278_604, 282, "5b515782887b"),
    "shufflenet_v2_swish": (2_278_604, 282, "5b515782887b"),
    "squeezenet1_0": (1_248_424, 52, "2ca3d55fe50e"),
    "squeezenet1_1": (1_235_496, 52, "1b35df7b48fb"),
    "vgg13": (133_047_848, 26, "c9a8e9ccd2ed"),
    "vgg16": (138_357_544, 32, "1c683e9a7d65"),
    "vgg19": (143_667_240, 38, "1431db9c53cf"),
    "vgg16_bn": (138_365_992, 84, "ad17693162ae"),
    "densenet169": (14_149_480, 846, "07664aac3544"),
    "densenet201": (20_013_928, 1006, "7cd14cdbb5ec"),
    "densenet264": (33_337_704, 1326, "943082dd8751"),
    "shufflenet_v2_x0_33": (647_272, 282, "1c6573401cf6"),
    "shufflenet_v2_x0_5": (1_366_792, 282, "5def8871f672"),
    "shufflenet_v2_x1_5": (3_503_624, 282, "d525b7cc8c6a"),
    "shufflenet_v2_x2_0": (7_366_536, 282, "e68ce767d0e1"),
    "resnext50_32x4d": (25_028_904, 267, "30b611a762c9"),
    "resnext50_64x4d": (45_192_488, 267, "35cb683fce40"),
    "resnext101_32x4d": (44_177_704, 522, "613714247681"),
    "resnext101_64x4d": (83_455_272, 522, "f1bb6cb1a59c"),
    "resnext152_32x4d": (59_951_400, 777, "5425ddb87b31"),
    "resnext152_64x4d": (114_971_944, 777, "e26dc6660917"),
    "wide_resnet50_2": (68_883_240, 267, "511fc45b9d94"),
    "wide_resnet101_2": (126_886_696, 522, "ee9f63b7c468"),
}
QUICK = (
    "alexnet",
    "vgg11_bn",
    "densenet121",
    "googlenet",
    "inception_v3",
    "mobilenet_v1",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "shufflenet_v2_x0_25",
    "shufflenet_v2_swish",
    "squeezenet1_0",
    "squeezenet1_1",
    "resnext50_32x4d",
    "wide_resnet50_2",
)


def digest(state):
    """Of lines "name [shape]", sorted."""
    lines = sorted(f"{name} {list(tensor.shape)}" for name, tensor in state.items())
    return hashlib.md5("\n".join(lines).encode()).hexdigest()[:12]


def make(name, **kwargs):
    if name.endswith("_bn"):
        return getattr(models, name.removesuffix("_bn"))(batch_norm=True, **kwargs)
    return getattr(models, name)(**kwargs)


def shapes(found):
    return [list(v.shape) for v in found] if isinstance(found, (list, tuple)) else list(found.shape)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PADDLE])
def test_parameters_and_scores_have_the_names_and_shapes_of_paddle(name, abstract):
    network = make(name)
    trainable, entries, names = PADDLE[name]
    state = network.state_dict()
    assert sum(int(np.prod(p.shape)) for p in network.parameters() if not p.stop_gradient) == trainable
    assert (len(state), digest(state)) == (entries, names)
    size = 299 if name == "inception_v3" else 224
    found = shapes(network(abstract(2, 3, size, size)))
    assert found == ([[2, 1000]] * 3 if name == "googlenet" else [2, 1000])


# features before pooling, of images of 224 x 224 (299 for Inception), as PaddlePaddle 3.3.1 gives them (its DenseNet
# fails without pooling)
FEATURES = {
    "alexnet": [256, 6, 6],
    "vgg11": [512, 7, 7],
    "densenet121": [1024, 7, 7],
    "inception_v3": [2048, 8, 8],
    "mobilenet_v1": [1024, 7, 7],
    "mobilenet_v2": [1280, 7, 7],
    "mobilenet_v3_small": [576, 7, 7],
    "shufflenet_v2_x0_5": [1024, 7, 7],
    "squeezenet1_1": [512, 13, 13],
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FEATURES)
def test_features_without_the_head(name, abstract):
    size = 299 if name == "inception_v3" else 224
    x = abstract(2, 3, size, size)
    if name == "alexnet":
        assert shapes(make(name, num_classes=0)(x)) == [2, *FEATURES[name]]
        return
    assert shapes(make(name, num_classes=0, with_pool=False)(x)) == [2, *FEATURES[name]]
    pooled = {"vgg11": [512, 7, 7], "squeezenet1_1": [512]}.get(name, [FEATURES[name][0], 1, 1])
    assert shapes(make(name, num_classes=0)(x)) == [2, *pooled]


def test_features_of_googlenet_come_from_three_places(abstract):
    found = make("googlenet", num_classes=0)(abstract(1, 3, 224, 224))
    assert shapes(found) == [[1, 1024, 1, 1], [1, 512, 3, 3], [1, 528, 3, 3]]


@pytest.mark.slow
def test_scales_round_widths(abstract):
    assert [divisible(v) for v in (3, 11.9, 12, 18, 60.8)] == [8, 16, 16, 24, 64]
    x = abstract(1, 3, 64, 64)
    assert shapes(models.mobilenet_v1(scale=0.25, num_classes=0)(x)) == [1, 256, 1, 1]
    assert shapes(models.mobilenet_v2(scale=0.35, num_classes=0)(x)) == [1, 1280, 1, 1]
    assert shapes(models.mobilenet_v2(scale=1.4, num_classes=0)(x)) == [1, 1792, 1, 1]
    assert shapes(models.mobilenet_v3_large(scale=0.75, num_classes=0)(x)) == [1, 720, 1, 1]
    assert shapes(models.VGG(vgg.make_layers([8, "M", 512, "M"]), num_classes=5)(x)) == [1, 5]


# of table 1 of arXiv:2010.11929 in full, with a head of 1,000 classes: counted by hand from its widths
TRANSFORMERS = {"vit_b_16": 86_567_656, "vit_b_32": 88_224_232, "vit_l_16": 304_326_632, "vit_l_32": 306_535_400}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_vision_transformers_have_the_published_numbers_of_parameters(name, abstract):
    network = make(name)
    assert sum(int(np.prod(p.shape)) for p in network.parameters()) == TRANSFORMERS[name]
    assert shapes(network(abstract(2, 3, 224, 224))) == [2, 1000]


def norm(x, weight, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * weight + bias


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def transformer(w, images, patch, heads):
    """The definition, image by image; w: the state_dict."""
    scores = []
    for image in images:
        side = image.shape[1] // patch
        kernel = w["patch_embed.proj.weight"].reshape(len(w["patch_embed.proj.bias"]), -1)
        tokens = [w["cls_token"][0, 0]]
        for i, j in np.ndindex(side, side):
            piece = image[:, i * patch : (i + 1) * patch, j * patch : (j + 1) * patch]
            tokens.append(kernel @ piece.reshape(-1) + w["patch_embed.proj.bias"])
        x = np.array(tokens) + w["pos_embed"][0]
        width = x.shape[1]
        for at in range(2):
            b = {k.removeprefix(f"blocks.{at}."): v for k, v in w.items()}
            qkv = norm(x, b["norm1.weight"], b["norm1.bias"]) @ b["attn.qkv.weight"] + b["attn.qkv.bias"]
            mixed = []
            for head in range(heads):
                part = [qkv[:, k * width + head * width // heads :][:, : width // heads] for k in range(3)]
                weights = np.exp(part[0] @ part[1].T / np.sqrt(width // heads))
                mixed.append(weights / weights.sum(1, keepdims=True) @ part[2])
            x = x + np.hstack(mixed) @ b["attn.proj.weight"] + b["attn.proj.bias"]
            inner = gelu(norm(x, b["norm2.weight"], b["norm2.bias"]) @ b["mlp.fc1.weight"] + b["mlp.fc1.bias"])
            x = x + inner @ b["mlp.fc2.weight"] + b["mlp.fc2.bias"]
        scores.append(norm(x, w["norm.weight"], w["norm.bias"])[0] @ w["head.weight"] + w["head.bias"])
    return np.array(scores)


def test_a_vision_transformer_is_its_definition_and_learns():
    network = models.VisionTransformer(8, 4, 12, depth=2, num_heads=3, num_classes=5, in_channels=2).astype("float64")
    rng = np.random.default_rng(0)
    network.set_state_dict({k: rng.normal(0, 0.3, v.shape) for k, v in network.state_dict().items()})
    images = rng.normal(size=(2, 2, 8, 8))
    scores = to_static(network)(to_tensor(images))
    want = transformer({k: v.numpy() for k, v in network.state_dict().items()}, images, 4, 3)
    # sums of up to 48 terms, one after another through ten layers
    np.testing.assert_allclose(scores.numpy(), want, rtol=0, atol=10 * 48 * 2.0**-52 * np.abs(want).max())
    scores.sum().backward()
    trained = [(n, p) for n, p in network.named_parameters() if p.trainable]
    assert [n for n, p in trained if p.grad is None or not np.abs(p.grad.numpy()).max() > 0] == []
    with pytest.raises(ShapeError, match="their sides must be img_size=8"):
        network(to_tensor(rng.normal(size=(1, 2, 12, 12))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("alexnet", 224), ("vgg11_bn", 32), ("densenet121", 32), ("googlenet", 224), ("inception_v3", 75),
        ("mobilenet_v1", 32), ("mobilenet_v2", 64), ("mobilenet_v3_small", 32), ("shufflenet_v2_x0_25", 64),
        ("squeezenet1_1", 32),
    ],
)  # fmt: skip
def test_gradients_reach_all_parameters(name, size):
    network = make(name, num_classes=4)
    x = to_tensor(np.random.default_rng(0).normal(size=(2, 3, size, size)).astype("float32"))

    def step(x):
        found = network(x)
        loss = sum((v * v).sum() for v in (found if isinstance(found, tuple) else (found,)))
        loss.backward()
        return loss

    assert np.isfinite(float(to_static(step)(x)))
    # a bias before a normalization has the gradient 0, up to rounding; a kernel has one
    assert [n for n, p in network.named_parameters() if p.trainable and p.grad is None] == []
    assert [n for n, p in network.named_parameters() if p.ndim > 1 and not np.abs(p.grad.numpy()).max() > 0] == []


def test_pretrained_reads_a_file_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "polyreme" / "weights"
    tiny = maker("tiny", models.LeNet, "LeNet", num_classes=3)
    with pytest.raises(
        DataError, match=rf"tiny: pretrained=True, but there is no {folder}/tiny.pdparams .*none are down"
    ):
        tiny(pretrained=True)
    folder.mkdir(parents=True)
    network = tiny()
    polyreme.save(network.state_dict(), str(folder / "tiny.pdparams"))
    again = tiny(pretrained=True)
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), tensor.numpy())
    with pytest.raises(
        DataError, match=r"2 names are .* of another shape, such as fc.2.bias, fc.2.weight; give the weights of this"
    ):
        tiny(pretrained=True, num_classes=4)
    (folder / "tiny.pdparams").write_bytes(b"\x80\x04torn")
    with pytest.raises(CheckpointError):
        tiny(pretrained=True)


def test_names_of_files_say_which_network(tmp_path, monkeypatch, abstract):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for call, name in (
        (lambda: models.vgg11(True, batch_norm=True), "vgg11_bn"),
        (lambda: models.vgg13(True), "vgg13"),
        (lambda: models.mobilenet_v1(True, scale=0.5), "mobilenetv1_0.5"),
        (lambda: models.mobilenet_v2(True), "mobilenetv2_1.0"),
        (lambda: models.mobilenet_v3_small(True), "mobilenet_v3_small_x1.0"),
        (lambda: models.squeezenet1_0(pretrained=True), "squeezenet1_0"),
    ):
        with pytest.raises(DataError, match=rf"{name}: pretrained=True, but there is no"):
            call()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: models.SqueezeNet("1.2"), "version='1.2'; give 1.0 or 1.1"),
        (lambda: models.DenseNet(120), "layers=120; give one of 121"),
        (lambda: models.ShuffleNetV2(0.7), "scale=0.7, act='relu'"),
        (lambda: models.ShuffleNetV2(act="gelu"), "act='gelu'"),
        (lambda: vgg.make_layers([8, "A"]), "cfg holds 'A'"),
        (lambda: models.VisionTransformer(224, 15), "img_size=224 of patch_size=15"),
        (lambda: models.alexnet(pretrained="yes"), "pretrained='yes'; give True or False"),
    ],
)
def test_what_cannot_be_had_is_refused(call, match):
    with pytest.raises(ConfigError, match=match):
        call()
