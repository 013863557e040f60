"""export.write and export.read: what comes back, open sizes, buckets, digests, and atomic replacement."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyreme import export
from polyreme.errors import CaptureError, CheckpointError, ConfigError, DTypeError, ShapeError
from polyreme.export.spec import ArraySpec
from polyreme.kernels import select


def spec(name, shape, dtype="float32"):
    return ArraySpec(name, np.dtype(dtype), tuple(shape))


def affine(state, inputs):
    return [inputs[0] @ state["w"] + state["b"]]


STATE = {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.float32([1, 2, 3])}


@pytest.fixture
def prefix(tmp_path):
    export.write(tmp_path / "net", affine, STATE, [spec("x", [None, 4])], ["y"])
    return tmp_path / "net"


def test_what_is_written_comes_back_and_runs_at_any_batch_size(prefix):
    art = export.read(prefix)
    assert str(art.inputs[0]) == "x float32[batch, 4]"
    assert art.outputs[0].shape == (None, 3)
    assert art.platforms == ("cpu", "cuda", "tpu")
    for name, value in STATE.items():
        np.testing.assert_array_equal(art.state[name], value)
    for batch in (1, 3):
        x = np.ones((batch, 4), np.float32)
        np.testing.assert_array_equal(art.call([x])[0], x @ STATE["w"] + STATE["b"])  # small integers: exact


def test_the_files_are_open_formats_and_the_program_is_called_with_jax_alone(prefix):
    body = json.loads(prefix.with_name("net.json").read_text())
    assert body["functions"]["forward"]["programs"][0]["file"] == "net.stablehlo"
    exported = jax.export.deserialize(bytearray(prefix.with_name("net.stablehlo").read_bytes()))
    (out,) = exported.call({k: jnp.asarray(v) for k, v in STATE.items()}, [jnp.ones((2, 4), jnp.float32)])
    np.testing.assert_array_equal(out, np.ones((2, 4), np.float32) @ STATE["w"] + STATE["b"])


def test_complex_and_sixteen_bit_state_keep_their_bits(tmp_path):
    state = {
        "c": np.array([1 + 2j, -0.0 + 1e-30j], np.complex64),
        "z": np.array(3 - 1j, np.complex128),
        "h": jnp.array([1.5, -2], jnp.bfloat16),
        "f": np.array([0.1], np.float16),
        "flag": np.array([True, False]),
        "n": np.array(7, np.int64),
    }
    export.write(tmp_path / "s", lambda s, x: [s["c"] + x[0], s["z"] * 2, s["h"], s["f"], s["flag"], s["n"]], state,
                 [spec("x", [2], "complex64")], ["c", "z", "h", "f", "flag", "n"])  # fmt: skip
    art = export.read(tmp_path / "s")
    for name, value in state.items():
        assert art.state[name].dtype == value.dtype
        assert np.asarray(art.state[name]).tobytes() == np.asarray(value).tobytes(), name
    out = art.call([np.zeros(2, np.complex64)])
    np.testing.assert_array_equal(out[0], state["c"])
    assert out[1] == 6 - 2j


@pytest.mark.parametrize("suffix", ["json", "stablehlo", "safetensors"])
def test_a_flipped_bit_is_named_with_both_digests(prefix, suffix):
    path = prefix.with_name(f"net.{suffix}")
    data = bytearray(path.read_bytes())
    at = data.index(b"batch") if suffix == "json" else len(data) // 2
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"net\.{suffix}.*digest expected [0-9a-f]{{32}}, got [0-9a-f]{{32}}"):
        export.read(prefix)


def test_missing_short_and_foreign_files_are_refused(prefix):
    with pytest.raises(CheckpointError, match=r"nothing\.json: no such file; give the prefix"):
        export.read(prefix.with_name("nothing"))
    program = prefix.with_name("net.stablehlo")
    whole = program.read_bytes()
    program.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"expected {len(whole)} bytes, got {len(whole) - 1}"):
        export.read(prefix)
    program.unlink()
    with pytest.raises(CheckpointError, match=r"net\.stablehlo: missing"):
        export.read(prefix)
    prefix.with_name("other.json").write_text('{"format": "x"}')
    with pytest.raises(CheckpointError, match="not the manifest of an artefact"):
        export.read(prefix.with_name("other"))
    prefix.with_name("other.json").write_text("[")
    with pytest.raises(CheckpointError, match="not a JSON manifest"):
        export.read(prefix.with_name("other"))


def test_a_manifest_of_a_later_format_or_with_a_hole_is_refused(prefix):
    path = prefix.with_name("net.json")
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "format_version": 2}))
    with pytest.raises(CheckpointError, match="format_version 2; this polyreme reads 1"):
        export.read(prefix)


def test_a_program_that_branches_on_a_size_names_the_input_and_dim_and_runs_by_buckets(tmp_path):
    def first_half(state, inputs):
        x = inputs[0]
        return [x[:, : 2 if x.shape[1] > 3 else 1] * 2]

    where = tmp_path / "half"
    with pytest.raises(CaptureError, match=r"dim 1 of input 'ids' cannot be left open.*buckets=\{'ids': \{1:"):
        export.write(where, first_half, {}, [spec("ids", [None, None])], ["y"])
    assert not list(tmp_path.iterdir())
    export.write(where, first_half, {}, [spec("ids", [None, None])], ["y"], buckets={"ids": {1: [2, 4]}})
    assert sorted(p.name for p in tmp_path.glob("*.stablehlo")) == ["half.0.stablehlo", "half.1.stablehlo"]
    art = export.read(where)
    assert [art.call([np.ones((3, n), np.float32)])[0].shape for n in (2, 4)] == [(3, 1), (3, 2)]
    with pytest.raises(ShapeError, match=r"'ids' has size 3 in dim 1, and there are programs for \[2, 4\] only"):
        art.call([np.ones((3, 3), np.float32)])
    export.write(where, lambda s, x: [x[0]], {}, [spec("ids", [None, None])], ["y"])
    assert sorted(p.name for p in tmp_path.glob("*.stablehlo")) == ["half.stablehlo"], "old programs are deleted"


def test_open_dims_share_symbols_only_where_they_must(tmp_path):
    both = [spec("a", [None, None]), spec("b", [None, None])]
    export.write(tmp_path / "apart", lambda s, x: [x[0].sum(1) + x[1].sum(1)], {}, both, ["y"])
    (out,) = export.read(tmp_path / "apart").call([np.ones((2, 3), np.float32), np.ones((2, 5), np.float32)])
    np.testing.assert_array_equal(out, [8, 8])
    export.write(tmp_path / "added", lambda s, x: [x[0] + x[1]], {}, both, ["y"])
    art = export.read(tmp_path / "added")
    with pytest.raises(ShapeError, match=r"dim 1 of input 'b' is 5, but dim 1 of 'a' is 3.*give equal sizes"):
        art.call([np.ones((2, 3), np.float32), np.ones((2, 5), np.float32)])


def test_calls_that_do_not_fit_name_the_input(prefix):
    art = export.read(prefix)
    with pytest.raises(DTypeError, match="input 'x' is float64, the program takes float32"):
        art.call([np.ones((2, 4))])
    with pytest.raises(ShapeError, match=r"input 'x' has size 5 in dim 1, which takes 4; give x float32\[batch, 4\]"):
        art.call([np.ones((2, 5), np.float32)])
    with pytest.raises(ShapeError, match="1 dims instead of 2"):
        art.call([np.ones(4, np.float32)])
    with pytest.raises(ShapeError, match="size 0 in dim 0"):
        art.call([np.ones((0, 4), np.float32)])
    with pytest.raises(ShapeError, match="2 inputs given, 1 needed"):
        art.call([np.ones((2, 4), np.float32)] * 2)
    with pytest.raises(CheckpointError, match="no function 'backward'"):
        art.function("backward")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platforms": "cpu"}, "platforms='cpu': give some of cpu, cuda, tpu, rocm as a sequence"),
        ({"platforms": ["npu"]}, "give some of"),
        ({"inputs": [3]}, "input 0 is 3; give InputSpecs"),
        ({"inputs": [spec("x", [None, 4]), spec("x", [1])]}, "two of the inputs are named 'x'"),
        ({"inputs": [spec("x", [None, -2])]}, "input 'x', dim 1 is -2; give a size"),
        ({"outputs": ["y", "y"]}, "two of the outputs are named 'y'"),
        ({"outputs": ["y", "z"]}, r"gave 1 arrays for outputs \['y', 'z'\]"),
        ({"buckets": {"z": {0: [1]}}}, "there is no input 'z'"),
        ({"buckets": {"x": {1: [4]}}}, "dim 1 of 'x' is not open"),
        ({"buckets": {"x": {0: [0]}}}, r"sizes \[0\]; give whole numbers from 1"),
        ({"prefix": "folder/"}, "names a folder; give FOLDER/NAME"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, change, message):
    given = {"prefix": tmp_path / "a", "inputs": [spec("x", [None, 4])], "outputs": ["y"], **change}
    options = {k: given[k] for k in ("platforms", "buckets") if k in given}
    with pytest.raises(ConfigError, match=message):
        export.write(given["prefix"], affine, STATE, given["inputs"], given["outputs"], **options)


def test_for_several_platforms_kernels_take_their_plain_forms(tmp_path):
    seen = []

    @jax.jit
    def inner(x):
        seen.append(select.backend())
        return x

    inner(jnp.ones(2, jnp.float32))  # cached by jax for this backend: the export must not take that
    for platforms in (("cpu", "tpu"), ("cpu",)):
        export.write(tmp_path / "k", lambda s, x: [inner(x[0])], {}, [spec("x", [2])], ["y"], platforms=platforms)
    assert seen == ["cpu", "other"], "the program for cpu alone finds the one that jax has already traced"


def test_gradients_are_exported_on_request_or_refused_with_the_reason(tmp_path):
    def loop(state, inputs):
        return [jax.lax.while_loop(lambda x: (x < 9).all(), lambda x: x * 2, inputs[0])]

    export.write(tmp_path / "a", affine, STATE, [spec("x", [None, 4])], ["y"], differentiable=True)
    art = export.read(tmp_path / "a")
    call = art.function("forward").programs[0].call
    grads = jax.grad(lambda s: call(s, [jnp.ones((2, 4), jnp.float32)])[0].sum())(
        {k: jnp.asarray(v) for k, v in STATE.items()}
    )
    np.testing.assert_array_equal(grads["b"], [2, 2, 2])
    assert art.manifest.differentiable is True
    export.write(tmp_path / "b", loop, {}, [spec("x", [3])], ["y"], differentiable=True)
    assert "while_loop" in export.read(tmp_path / "b").manifest.differentiable


def test_a_writer_that_fails_leaves_what_was_there(prefix):
    before = {p.name: p.read_bytes() for p in prefix.parent.iterdir()}
    with pytest.raises(CaptureError):
        export.write(prefix, lambda s, x: [x[0] if x[0].shape[0] > 3 else -x[0]], {}, [spec("x", [None])], ["y"])
    assert {p.name: p.read_bytes() for p in prefix.parent.iterdir()} == before


def test_a_program_that_this_jax_cannot_read_says_what_to_do(prefix, monkeypatch):
    def refuse(data):
        raise ValueError("calling_convention_version 99")

    monkeypatch.setattr(jax.export, "deserialize", refuse)
    with pytest.raises(CheckpointError, match=r"net\.stablehlo: jax .* cannot read it .*version 99.*export it again"):
        export.read(prefix)
