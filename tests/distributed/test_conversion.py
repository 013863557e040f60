"""aoa_config: rules that make the tensors of one naming out of those of another."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.distributed import ShardedWeight, load_merged_state_dict, load_state_dict, save_state_dict
from polyreme.distributed.checkpoint.conversion import ConversionRules
from polyreme.errors import CheckpointError, ConfigError
from polyreme.io import safetensors_file

Q, K, V = np.arange(8.0).reshape(2, 4), np.arange(10.0, 14.0).reshape(2, 2), np.arange(20.0, 24.0).reshape(2, 2)
HEADS = "num_heads=4, num_key_value_groups=2"
GROUPED = np.stack([*Q.T[:2], K.T[0], V.T[0], *Q.T[2:], K.T[1], V.T[1]], 1)
PLAIN = np.concatenate([Q, K, V], 1)


def convert(rules, tensors, targets=None, reverse=False):
    conversion = ConversionRules({"aoa_statements": rules, "aoa_config_reverse": reverse}, tensors)
    return {key: np.asarray(array).tolist() for key, array in conversion.convert(tensors, targets).items()}


@pytest.mark.parametrize(
    ("rules", "one", "other"),
    [
        (["a -> b"], {"a": Q}, {"b": Q}),
        (["a^T -> b"], {"a": Q}, {"b": Q.T}),
        (["a -> b, permute='[1, 0]'"], {"a": Q}, {"b": Q.T}),
        (["a, b -> c, axis=0"], {"a": K, "b": V}, {"c": np.concatenate([K, V])}),
        (["a^T, b^T -> c, fused_ffn"], {"a": K, "b": V}, {"c": np.concatenate([K.T, V.T], 1)}),
        ([f"q, k, v -> f, fused_qkv, {HEADS}"], {"q": Q, "k": K, "v": V}, {"f": GROUPED}),
        ([f"q,k,v -> f, fused_qkv, {HEADS}, axis=0"], {"q": Q.T, "k": K.T, "v": V.T}, {"f": GROUPED.T}),
        ([f"f -> q, k, v, fused_qkv_old, {HEADS}"], {"f": PLAIN}, {"q": Q, "k": K, "v": V}),
        (["a -> t", "t^T -> b"], {"a": Q}, {"b": Q.T}),
        (["h.$LAYER_ID.w^T -> m.$LAYER_ID.w"], {"h.0.w": Q, "h.11.w": K}, {"m.0.w": Q.T, "m.11.w": K.T}),
        (
            ["h.$LAYER_ID.e.$EXPERT_ID.w -> m.$EXPERT_ID.$LAYER_ID"],
            {"h.0.e.1.w": Q, "h.2.e.0.w": K},
            {"m.1.0": Q, "m.0.2": K},
        ),
        (["a[0:2] -> c, axis=0"], {"a_0": K, "a_1": V}, {"c": np.concatenate([K, V])}),
        (["a -> b", "same -> same"], {"a": Q, "same": K, "a.moment1_0": V}, {"b": Q, "same": K, "b.moment1_0": V}),
        (["a -> b, src_dtype='float64', dst_dtype='float64'"], {"a": Q}, {"b": Q}),
    ],
)  # fmt: skip
def test_a_rule_there_and_back(rules, one, other):
    assert convert(rules, one) == {key: array.tolist() for key, array in other.items()}
    assert convert(rules, one, list(other)) == {key: array.tolist() for key, array in other.items()}
    assert convert(rules, other, list(one), reverse=True) == {key: array.tolist() for key, array in one.items()}


def test_what_rules_leave_out_and_leave_alone():
    tensors = {f"e.{n}.w": np.full((1, 1), n) for n in range(11)} | {"old": Q, "a.step_0": V, "b.step_0": K}
    rules = ["e.*.w -> e.w, axis=0", "old -> _", "_ -> new", "a, b -> c, axis=0", "e.w -> e.w, dtype='float16'"]
    assert convert(rules, tensors) == {"e.w": [[n] for n in range(11)], "c.step_0": V.tolist()}
    conversion = ConversionRules({"aoa_statements": rules}, tensors)
    (array,) = conversion.convert(tensors, ["e.w", "new"]).values()
    assert (array.dtype, conversion.left_alone) == ("float16", {"new"})
    assert convert(["l.$LAYER_ID_OFFSET.w -> m.$LAYER_ID_OFFSET.w"], {"l.1.w": Q}) == {"m.0.w": Q.tolist()}
    assert convert(["e.w -> e.*.w, axis=1"], {"e.w": K}, ["e.0.w", "e.1.w"])["e.1.w"] == K[:, 1:].tolist()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["a b"], "a rule has names, ->, and names"),
        (["a -> b^T"], r"\^T stands on the left alone"),
        (["a -> b, axes=1"], "the setting 'axes'; did you mean 'axis'"),
        (["a -> b, axis=x"], "axis is a whole number, got 'x'"),
        (["a, a -> b"], "say which, axis=0"),
        (["a, b -> c, axis=0"], r"shapes \[\[2, 4\], \[2, 2\]\] differ beside dim 0"),
        (["a -> b, c, axis=2"], r"axis=2 is not a dim of shape \[2, 4\]"),
        (["a -> b, c, d, axis=1"], "no 3 equal parts"),
        (["a, a -> b, c, axis=0"], "several names on both sides"),
        (["a, a, a -> b, fused_qkv, num_heads=3, num_key_value_groups=2"], "a multiple of num_key_value_groups"),
        (["a -> b.$LAYER_ID"], "has no name to be looked up by"),
    ],
)
def test_rules_that_cannot_be_followed(rules, message):
    with pytest.raises(ConfigError, match=message):
        convert(rules, {"a": Q, "b": K})
    with pytest.raises(ConfigError, match="did you mean 'aoa_statements'"):
        ConversionRules({"aoa_statement": []}, [])
    with pytest.raises(ConfigError, match="give src_dtype and dst_dtype"):
        ConversionRules({"aoa_statements": ["a -> b, dtype='float16'"], "aoa_config_reverse": True}, ["b"])


def test_state_dicts_of_other_names(tmp_path):
    save_state_dict({"q": paddle.to_tensor(Q), "kept": paddle.to_tensor(K)}, tmp_path / "ours")
    with open(tmp_path / "model.safetensors", "wb") as file:
        safetensors_file.write(file, {"q": Q, "kept": K}, {})
    rules = {"aoa_statements": ["q^T -> w"]}
    for folder, settings in ((tmp_path / "ours", {}), (tmp_path, {"safetensors": True})):
        w, rows = paddle.zeros([4, 2], "float64"), paddle.zeros([1, 2], "float64")
        shard = ShardedWeight("kept", rows, (1, 2), (2, 2), (1, 0))
        load_state_dict({"w": w, "kept": shard}, folder, aoa_config=rules, **settings)
        assert (w.tolist(), rows.tolist()) == (Q.T.tolist(), K[1:].tolist())
        whole = load_merged_state_dict(folder, aoa_config=rules, **settings)
        assert {key: t.tolist() for key, t in whole.items()} == {"w": Q.T.tolist(), "kept": K.tolist()}
        with pytest.raises(CheckpointError, match=r"w: expected float64\[2, 4\], the checkpoint has float64\[4, 2\]"):
            load_state_dict({"w": paddle.zeros([2, 4], "float64")}, folder, aoa_config=rules, **settings)
        with pytest.warns(UserWarning, match="lacks 1 keys, left as they are: .'b'."):
            load_state_dict({"b": w}, folder, aoa_config=rules, **settings)
