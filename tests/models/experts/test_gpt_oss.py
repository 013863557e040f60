"""gpt-oss: attention beside sinks and its gradients, and experts that are published in MXFP4."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from polyreme.eager.tensor import to_tensor
from polyreme.errors import CheckpointError
from polyreme.models import AutoModelForCausalLM
from polyreme.models.experts.gpt_oss import GptOss, GptOssConfig
from polyreme.models.files.mxfp4 import decoded_weights
from polyreme.models.files.published import Changed
from polyreme.models.parts.cache import attend_beside_sinks
from polyreme.nn import functional as F
from polyreme.ops.manipulation import concat
from tests.models import parity

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("window", [0, 3])
def test_a_sink_takes_its_part_of_the_softmax(window):
    """Output and gradients, as of a softmax over the keys and a score that gives nothing."""
    rng = np.random.default_rng(0)
    batch, seq, heads, width = 2, 7, 4, 6
    arrays = [rng.standard_normal((batch, seq, heads, width), "float32") for _ in range(3)]
    arrays += [rng.standard_normal(heads, "float32")]
    weight = to_tensor(rng.standard_normal((batch, seq, heads, width), "float32"))
    places = np.arange(seq)
    seen = (places <= places[:, None]) & (places > places[:, None] - (window or seq))

    def plainly(q, k, v, sinks):
        q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
        scores = q.matmul(k, transpose_y=True) * width**-0.5 + to_tensor(np.where(seen, 0, -1e9).astype("float32"))
        sink = sinks.reshape([1, heads, 1, 1]).expand([batch, heads, seq, 1])
        shares = F.softmax(concat([scores, sink], -1), -1)[..., :-1]
        return shares.matmul(v).transpose([0, 2, 1, 3])

    results = []
    for attend in (plainly, lambda *inputs: attend_beside_sinks(*inputs, window=window)):
        inputs = [to_tensor(array, stop_gradient=False) for array in arrays]
        out = attend(*inputs)
        (out * weight).sum().backward()
        results.append([out.numpy(), *(x.grad.numpy() for x in inputs)])
    # scores, softmax and mix, and back through them; a sink's gradient is summed over batch and places
    terms = 3 * (width + 2 * seq) + batch * seq * width
    for want, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=parity.tolerance(terms, want))


def stored(rng, experts, outs, ins):
    """(blocks, scales, what they say as [experts, ins, outs]), number by number."""
    blocks = rng.integers(0, 256, (experts, outs, ins // 32, 16), "uint8")
    scales = rng.integers(124, 129, (experts, outs, ins // 32), "uint8")
    dense = np.zeros((experts, ins, outs), np.float32)
    for e, i, o in np.ndindex(dense.shape):
        byte = int(blocks[e, o, i // 32, i % 32 // 2])
        code = byte >> 4 if i % 2 else byte & 15
        sign = -1 if code > 7 else 1
        dense[e, i, o] = sign * NUMBERS[code % 8] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
    return blocks, scales, dense


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model twice: its experts as they are, and in 4 bits."""
    rng, root = np.random.default_rng(1), tmp_path_factory.mktemp("gpt_oss")
    GptOss(GptOssConfig.nano(num_layers=1, vocab_size=16)).save_pretrained(root / "plain")
    weights = load_file(root / "plain" / "model.safetensors")
    packed = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, ins, outs = weights[name].shape
        del packed[name]
        packed[f"{name}_blocks"], packed[f"{name}_scales"], weights[name] = stored(rng, experts, outs, ins)
    (root / "packed").mkdir()
    save_file(weights, root / "plain" / "model.safetensors")
    save_file(packed, root / "packed" / "model.safetensors")
    config = json.loads((root / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (root / "packed" / "config.json").write_text(json.dumps(config))
    return root


def test_experts_of_4_bits_are_decoded(folders):
    models = [AutoModelForCausalLM.from_pretrained(folders / name) for name in ("plain", "packed")]
    for (name, want), (_, got) in zip(*(model.named_parameters() for model in models), strict=True):
        np.testing.assert_array_equal(got.numpy(), want.numpy(), err_msg=name)
    packed = load_file(folders / "packed" / "model.safetensors")
    files = {name: Changed(a.shape, a.dtype, lambda index, a=a: a[index]) for name, a in packed.items()}
    name = next(name for name in packed if name.endswith("down_proj_blocks")).removesuffix("_blocks")
    part = decoded_weights(files)[name].read((slice(1, 3), slice(5, 31), slice(2, 7)))
    np.testing.assert_array_equal(part, models[0].blocks[0].ffn.down.numpy()[1:3, 5:31, 2:7])


def test_no_expert_is_decoded_twice(folders, monkeypatch):
    """Gate and up lie in one array, of which each reads its own lines."""
    decoded = []
    monkeypatch.setattr(np, "ldexp", lambda x, e, ldexp=np.ldexp: decoded.append(x.size) or ldexp(x, e))
    AutoModelForCausalLM.from_pretrained(folders / "packed")
    packed = load_file(folders / "packed" / "model.safetensors")
    assert sum(decoded) == 2 * sum(a.size for name, a in packed.items() if name.endswith("_blocks"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights, name: weights.pop(f"{name}_scales"), "stored in two parts, and .*_scales is missing"),
        (lambda weights, name: weights.update({f"{name}_scales": weights[f"{name}_scales"][:, 1:]}), "they are bytes"),
        (
            lambda weights, name: weights.update({f"{name}_blocks": weights[f"{name}_blocks"].astype("float32")}),
            r"_blocks are float32 .*; they are bytes \[experts, out, groups, 16\]",
        ),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_torn_experts_are_refused(folders, tmp_path, change, message):
    weights = load_file(folders / "packed" / "model.safetensors")
    change(weights, next(name for name in weights if name.endswith("_blocks")).removesuffix("_blocks"))
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders / "packed" / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)
