"""Logical dims found from a model's own ops."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import polyreme as paddle
from polyreme import nn
from polyreme.distributed.auto_parallel.dims import factors
from polyreme.distributed.auto_parallel.dims.blocks import repeated_blocks
from polyreme.distributed.auto_parallel.dims.constrain import constraints
from polyreme.distributed.auto_parallel.dims.infer import infer_dims
from polyreme.errors import ConfigError
from polyreme.hapi import InputSpec
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import Llama, LlamaConfig
from polyreme.nn import functional as F
from polyreme.vision.models import VisionTransformer, resnet18
from tests.distributed.auto_parallel.plain_models import Experts, Language, strip

IDS = InputSpec([None, 12], "int64")
HAND_WRITTEN = {
    "gpt": lambda: GPT(GPTConfig.nano(dropout=0.1)),
    "gpt untied": lambda: GPT(GPTConfig.nano(tie_embeddings=False)),
    "gpt recompute": lambda: GPT(GPTConfig.nano(recompute="full_attn")),
    "llama": lambda: Llama(LlamaConfig.nano()),
    "llama ungrouped": lambda: Llama(LlamaConfig.nano(num_kv_heads=4, tie_embeddings=True)),
    "llama eight heads": lambda: Llama(LlamaConfig.nano(num_heads=8, num_kv_heads=2, hidden_size=64)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", HAND_WRITTEN)
@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", "logits"])
def test_what_was_written_by_hand_is_found(name, with_loss):
    with paddle.LazyGuard():
        model = HAND_WRITTEN[name]()
    want = {name: p.dims for name, p in model.named_parameters()}
    if name == "llama ungrouped":  # as many key heads as query heads are heads like them
        want = {name: tuple("heads" if d == "kv_heads" else d for d in dims) for name, dims in want.items()}
    found = infer_dims(strip(model), [IDS], [IDS] if with_loss else [])
    assert found.dims == want
    assert found.set_dims() == []
    assert {name: p.dims for name, p in model.named_parameters()} == want


EMBED_HEADS, HEADS_EMBED = ("embed", "heads"), ("heads", "embed")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kind", "kv_heads", "want"),
    [
        ("separate", 4, {"q": EMBED_HEADS, "k": EMBED_HEADS, "v": EMBED_HEADS, "o": HEADS_EMBED}),
        ("expand", 2, {"q": EMBED_HEADS, "k": ("embed", "kv_heads"), "v": ("embed", "kv_heads"), "o": HEADS_EMBED}),
        ("repeat", 2, {"q": EMBED_HEADS, "k": ("embed", "kv_heads"), "v": ("embed", "kv_heads"), "o": HEADS_EMBED}),
        ("separate", 1, {"q": EMBED_HEADS, "k": ("embed", None), "v": ("embed", None), "o": HEADS_EMBED}),
        ("fused", 4, {"qkv": EMBED_HEADS, "o": HEADS_EMBED}),
        # runs of unequal length: which part of the weight is whose is not known, so it stays whole
        ("fused_grouped", 2, {"qkv": ("embed", None), "o": HEADS_EMBED}),
    ],
)
def test_attention_written_out(kind, kv_heads, want):
    inferred = infer_dims(Language((kind,), kv_heads=kv_heads), [IDS])
    for name, dims in want.items():
        assert inferred.dims[f"blocks.0.attention.{name}.weight"] == dims, name
        assert inferred.dims[f"blocks.0.attention.{name}.bias"] == dims[1:], name
    assert inferred.dims["blocks.0.mlp.up.weight"] == ("embed", "ffn")
    assert inferred.dims["blocks.0.mlp.down.weight"] == ("ffn", "embed")
    assert inferred.dims["tokens.weight"] == ("vocab", "embed")
    assert inferred.dims["places"] == (None, "embed")
    assert "not outermost" in inferred.rows["blocks.0.mlp.up.weight"].note
    assert bool(inferred.rows[f"blocks.0.attention.{next(iter(want))}.weight"].note) == (kind == "fused")


def test_vision_transformer():
    inferred = infer_dims(
        VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=10),
        [InputSpec([None, 3, 16, 16])],
    )
    assert inferred.dims["blocks.1.attn.qkv.weight"] == EMBED_HEADS
    assert inferred.dims["blocks.1.attn.proj.weight"] == HEADS_EMBED
    assert inferred.dims["blocks.0.mlp.fc1.weight"] == ("embed", "ffn")
    assert inferred.dims["blocks.0.mlp.fc2.weight"] == ("ffn", "embed")
    assert inferred.dims["patch_embed.proj.weight"] == ("embed", None, None, None)
    assert inferred.dims["head.weight"] == ("embed", None)
    assert [run.paths for run in repeated_blocks(inferred.traced)] == [("blocks.0", "blocks.1")]
    streams = [c for c in constraints(inferred) if c.path.startswith("blocks.") and c.path.count(".") == 1]
    assert [c.dims for c in streams] == [(("batch", "seq", "embed"),)] * 2


def test_convolutions_stay_whole():
    with paddle.LazyGuard():
        model = resnet18()
    found = infer_dims(model, [InputSpec([None, 3, 32, 32])])
    assert {name for dims in found.dims.values() for name in dims} == {None}


def test_dims_of_experts():
    found = infer_dims(Experts(), [InputSpec([None, 6, 8])]).dims
    assert found["up"] == ("expert", "embed", "ffn")
    assert found["down"] == ("expert", "ffn", "embed")
    assert found["gate.weight"] == ("embed", None)


def test_encoder_and_decoder_with_layers_of_the_library():
    model = nn.Transformer(16, 4, 1, 1, 24)
    want = {name: p.dims for name, p in model.named_parameters()}
    found = infer_dims(strip(model), [InputSpec([None, 6, 16]), InputSpec([None, 5, 16])]).dims
    assert found == want


class Recurrent(nn.Layer):
    def __init__(self, kind):
        super().__init__()
        self.steps, self.head = kind(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.head(self.steps(x)[0])


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.SimpleRNN])
def test_what_a_loop_sums_over_stays_whole(kind):
    found = infer_dims(Recurrent(kind), [InputSpec([None, 5, 6])]).dims
    assert {name for dims in found.values() for name in dims} == {None}


class Branching(nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        x = self.up(x)
        if x.sum() > 0:
            x = x * 2
        return self.down(x)


def test_what_comes_out_of_a_branch_is_not_known():
    assert infer_dims(Branching(), [InputSpec([None, 6])]).dims["up.weight"] == (None, None)


class Mixing(nn.Layer):
    """Hidden values that are sorted, summed up or shifted along the hidden dim cannot be split there."""

    def __init__(self, mix):
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(6, 16), nn.Linear(16, 6), mix

    def forward(self, x):
        return self.down(self.mix(self.up(x)))


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h.sort(-1),
        lambda h: h.cumsum(-1),
        lambda h: h.roll(1, -1),
        lambda h: h.flip([-1]),
        lambda h: paddle.concat([h[..., 3:], h[..., :3]], -1),
        lambda h: h[..., paddle.arange(15, -1, -1)],
        lambda h: h * h.topk(1, -1)[0],
        lambda h: paddle.fft.fft(h).real(),
        lambda h: F.max_pool1d(h.unsqueeze(1), 3, 1, 1).squeeze(1),
        lambda h: F.pad(h.unsqueeze(1), [1, 1], data_format="NCL")[:, 0, 1:-1],
        lambda h: F.conv1d(h.unsqueeze(1), paddle.ones([1, 1, 3]), padding=1).squeeze(1),
    ],
    ids=["sort", "cumsum", "roll", "flip", "rotate", "gather", "topk", "fft", "pool", "pad", "convolution"],
)
def test_what_is_mixed_stays_whole(mix):
    assert infer_dims(Mixing(mix), [InputSpec([None, 6])]).dims["up.weight"] == (None, None)


@pytest.mark.parametrize(
    "keep",
    [
        lambda h: F.gelu(h),
        lambda h: h.transpose([1, 0]).transpose([1, 0]),
        lambda h: h.reshape([-1, 4, 4]).flatten(1),
        lambda h: F.dropout(h, 0.5),
        lambda h: F.layer_norm(h, [16]),
        lambda h: paddle.where(h > 0, h, h * 0.1),
        lambda h: paddle.stack([h, h * 2]).sum(0),
        lambda h: paddle.concat(h.chunk(2, 0), 0),
        lambda h: h.tile([1, 1, 1])[0],
        lambda h: h * F.softmax(h, 0),
        lambda h: h.clone().cpu().astype("float32"),
    ],
    ids=["gelu", "transpose", "reshape", "dropout", "norm", "where", "stack", "rows", "tile", "softmax", "clone"],
)
def test_what_works_on_each_element_is_split(keep):
    found = infer_dims(Mixing(keep), [InputSpec([None, 6])]).dims
    assert (found["up.weight"], found["down.weight"]) == (("embed", "ffn"), ("ffn", "embed"))


def test_names_that_do_not_fit_a_plan_are_left_out():
    found = infer_dims(Language(("separate",), width=12, heads=3, kv_heads=3, hidden=10, vocab=33), [IDS])
    model = found.traced.model
    left = found.set_dims(Plan.from_degrees(mp=2, dp=2, sharding=2, sharding_stage=3))
    dims = {name: p.dims for name, p in model.named_parameters()}
    assert dims["blocks.0.attention.q.weight"] == ("embed", None)  # three heads
    assert dims["tokens.weight"] == (None, "embed")
    assert dims["blocks.0.mlp.up.weight"] == ("embed", "ffn")
    assert "tokens.weight: vocab in 33 parts is not cut in 2" in left
    assert "blocks.0.attention.q.weight: heads in 3 parts is not cut in 2" in left


def test_overrides_by_name_win():
    model = Language(("separate",))
    given = {r".*attention\.[qkv]\.weight": ("embed", None), "places": ("seq", None)}
    found = infer_dims(model, [IDS], overrides=given)
    assert found.dims["blocks.0.attention.q.weight"] == ("embed", None)
    assert found.dims["blocks.0.attention.o.weight"] == HEADS_EMBED
    assert found.dims["places"] == ("seq", None)
    assert found.rows["places"].source == "override"
    with pytest.raises(ConfigError, match=re.escape("overrides: no parameter is named 'token.weight'; did you mean")):
        infer_dims(model, [IDS], overrides={"token.weight": ("vocab", "embed")})
    with pytest.raises(ConfigError, match=re.escape("gives dims ('embed',) to places of shape [12, 16]")):
        infer_dims(model, [IDS], overrides={"places": ("embed",)})


def test_dims_that_are_there_are_kept():
    model = nn.Sequential(nn.Linear(6, 8, dims=("embed", "mine")), nn.ReLU(), nn.Linear(8, 6))
    found = infer_dims(model, [InputSpec([None, 6])])
    assert found.dims["0.weight"] == ("embed", "mine")
    assert found.rows["0.weight"].source == "marked"
    assert found.dims["2.weight"] == ("ffn", "embed")


def test_the_table_says_blocks_once():
    text = str(infer_dims(Language(("separate", "separate")), [IDS]))
    assert re.search(
        r"blocks\.\*\.attention\.q\.weight \(2\) +\[16, 16\] +16, 4x4 +embed, heads +linear: columns", text
    )
    assert re.search(r"tokens\.weight +\[48, 16\] +48, 16 +vocab, embed +embedding_rows, matmul: columns", text)


# factors


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_factors_number_elements_as_the_array_does(sizes, random):
    """After any chain of reshapes and transposes, a factor's stride in the first array is what it was."""
    array = np.arange(np.prod(sizes)).reshape(sizes)
    dims = start = factors.fresh(sizes)
    for _ in range(4):
        if random.random() < 0.5:
            order = random.sample(range(array.ndim), array.ndim)
            array, dims = array.transpose(order), tuple(dims[i] for i in order)
        else:
            shape = _another_shape(array.size, random)
            dims = factors.reshaped(dims, shape)
            array = array.reshape(shape)
    strides, stride = {}, 1
    for leaf in reversed([leaf for dim in start for leaf in factors.leaves(dim)]):
        strides[leaf], stride = stride, stride * leaf.size
    for at, dim in enumerate(dims):
        parts = factors.leaves(dim)
        if parts and all(leaf in strides for leaf in parts):
            line = np.moveaxis(array, at, 0).reshape(dim.size, -1)[:, 0]
            steps = [np.arange(leaf.size) * strides[leaf] for leaf in parts]
            want = steps[0]
            for step in steps[1:]:
                want = (want[:, None] + step).reshape(-1)
            assert np.array_equal(line - line[0], want)


def _another_shape(size, random):
    shape = []
    while size > 1:
        part = random.choice([d for d in range(2, size + 1) if size % d == 0])
        shape.append(part)
        size //= part
    return shape or [1]


def test_sizes_that_do_not_divide_are_left_apart():
    made = factors.reshaped(factors.fresh([4, 6]), [6, 4])
    assert [len(factors.leaves(dim)) for dim in made] == [1, 1]
    six, other = factors.fresh([24, 24])
    factors.align(factors.fresh([6, 4]), [six])
    assert not factors.align(factors.fresh([4, 6]), [six])
    factors.same(six, other)
    assert repr(other) == "6x4"
