"""Programs written as JSON and read again: the same listing, and the same numbers to the bit."""

import io
import json

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.core import dtype as dtypes
from polyreme.errors import CheckpointError, ConfigError, ProgramError
from polyreme.io.complex_pairs import to_pairs
from polyreme.jit.control_flow import cond, while_loop
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.nn import ClipGradByGlobalNorm, ParamAttr
from polyreme.nn.initializer import Assign, KaimingNormal
from polyreme.optimizer import SGD, Adam, Momentum
from polyreme.optimizer.lr import LinearWarmup, StepDecay
from polyreme.program.encoding import Encoder, ValueDecoder
from polyreme.program.serial import VERSION
from polyreme.program.values import Ref, SizeOf
from polyreme.regularizer import L1Decay, L2Decay

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 3, 8, 8)).astype("float32")
ROWS = RNG.normal(size=(4, 6)).astype("float32")
IDS = RNG.integers(0, 16, size=(2, 4))


def mlp():
    """Attributes of parameters, groups of settings, a clip, a schedule inside a schedule, dropout."""
    x = static.data("x", [None, 6])
    attr = ParamAttr(initializer=KaimingNormal(), learning_rate=0.5, regularizer=L1Decay(0.01), need_clip=False)
    with static.name_scope("body"):
        h = F.dropout(F.relu(paddle.nn.Linear(6, 5, weight_attr=attr)(x)), 0.3)
    frozen = paddle.nn.Linear(5, 3, bias_attr=ParamAttr(trainable=False, initializer=Assign([1.0, 2.0, 3.0])))
    loss = frozen(h).square().mean()
    rate = LinearWarmup(StepDecay(0.05, 1, gamma=0.5), 1, 0.01, 0.05)
    Adam(rate, beta1=0.8, weight_decay=L2Decay(0.1), grad_clip=ClipGradByGlobalNorm(0.1)).minimize(loss)
    return {"x": ROWS}, [loss]


def convolution():
    """Statistics that a run changes, sizes known only when it runs, indexing, autocast."""
    x = static.data("x", [None, 3, 8, 8])
    with paddle.amp.auto_cast(dtype="bfloat16"):
        h = F.relu(paddle.nn.BatchNorm2D(4)(paddle.nn.Conv2D(3, 4, 3)(x)))
    flat = h.astype("float32").reshape([x.shape[0], -1])[:, 1:, ...][:, ::2]
    mask = paddle.to_tensor(RNG.normal(size=(1, 72)).astype("float32"))
    loss = (flat[:, :72] * mask).mean() + paddle.shape(flat)[0] * 0.0
    Momentum(0.1, use_nesterov=True).minimize(loss)
    return {"x": IMAGES}, [loss, flat]


def branches():
    """Blocks in blocks, values changed in place, what a loop carries, complex and infinite constants."""
    x = static.data("x", [None, 6])
    w = paddle.create_parameter([6], "float32", default_initializer=paddle.nn.initializer.Constant(0.5))
    count = paddle.zeros([1], "int64")

    def body(i, a):
        return [i + 1, cond(a > 1.0, lambda: a * 0.5, lambda: a * 3)]

    _, total = while_loop(lambda i, a: i < 3, body, [count, (x * w).mean()], maximum_iterations=5)
    z = paddle.zeros([2, 2])
    z[0, 1] = total
    z += 1
    big = paddle.where(z > 100.0, paddle.full([2, 2], float("inf")), z)
    turned = paddle.full([2], 1 + 2j, "complex64") * 2
    loss = z.sum()
    SGD(0.01).minimize(loss)
    return {"x": ROWS}, [loss, z, big, turned]


def embedding():
    ids = static.data("ids", [None, 4], "int64")
    table = paddle.nn.Embedding(16, 3)
    loss = (table(ids) * paddle.rand([4, 3])).sum()
    SGD(0.5).minimize(loss)
    return {"ids": IDS}, [loss]


def groups():
    """Two parameters with settings of their groups, one without."""
    ones = paddle.nn.initializer.Constant(1.0)
    a, b, c = (paddle.create_parameter([2], "float32", default_initializer=ones) for _ in range(3))
    loss = (a + b + c).sum() * static.data("x", [])
    SGD(0.25, parameters=[{"params": [a], "learning_rate": 0.5}, {"params": [c, b]}]).minimize(loss)
    return {"x": np.ones((), "float32")}, [loss, a, b]


def gpt():
    ids = static.data("ids", [None, 4], "int64")
    model = GPT(GPTConfig.nano(num_layers=1, vocab_size=16, hidden_size=8, num_heads=2, seq_len=4, recompute="full"))
    loss = F.cross_entropy(model(ids).reshape([-1, 16]), ids.reshape([-1]))
    Adam(0.01).minimize(loss)
    return {"ids": IDS}, [loss]


def trained(main, startup, feed, names):
    """What three steps give, from a seed."""
    paddle.seed(5)
    exe, scope, steps = static.Executor(), static.Scope(), []
    exe.run(startup, scope=scope)
    for _ in range(3):
        steps.append(exe.run(main, feed=feed, fetch_list=names, scope=scope))
        for op in main.global_block().ops:
            if op.kind == "optimize" and op.optimizer._scheduler is not None:
                op.optimizer._scheduler.step()
    return [array.tobytes() for step in steps for array in step]


@pytest.mark.slow_cases("gpt", "mlp", "embedding")
@pytest.mark.parametrize("build", [mlp, convolution, branches, embedding, groups, gpt], ids=lambda f: f.__name__)
def test_a_read_program_lists_runs_and_trains_as_the_one_that_was_written(build, static_mode):
    feed, fetches = build()
    names = [v.name for v in fetches]
    beside = {}
    texts = [p.to_json(beside if p is static_mode[0] else None) for p in static_mode]
    main, startup = (
        static.Program.from_json(texts[0], beside),
        static.Program.parse_from_string(static_mode[1].serialize_to_string()),
    )
    for was, now in zip(static_mode, (main, startup), strict=True):
        assert now.to_string(with_details=True) == was.to_string(with_details=True)
    assert main.to_json({}) == texts[0]
    want = trained(*static_mode, feed, names)
    assert trained(main, startup, feed, names) == want
    assert len(set(want)) > len(names)  # it trains


def test_settings_of_groups_hold_in_programs(static_mode):
    feed, (loss, a, b) = groups()
    exe = static.Executor()
    exe.run(static_mode[1])
    found = [exe.run(feed=feed, fetch_list=[loss, a, b]) for _ in range(2)][1]
    assert [v.tolist() for v in found] == [2 * (0.875 + 0.75 + 0.75), [0.75, 0.75], [0.5, 0.5]]  # after two steps


def test_a_clone_of_a_read_program_evaluates(static_mode):
    mlp()
    main = static.Program.from_json(static_mode[0].to_json())
    test = main.clone(for_test=True)
    assert [op.kind for op in test.global_block().ops] == ["linear", "relu", "dropout", "linear", "square", "mean"]
    for was, now in zip(static_mode[0].all_parameters(), main.all_parameters(), strict=True):
        assert (now.trainable, now.optimize_attr, now.regularizer, now.need_clip, now.dims) == (
            was.trainable, was.optimize_attr, was.regularizer, was.need_clip, was.dims,
        )  # fmt: skip


def test_what_is_recorded_into_a_read_program_gets_new_names(static_mode):
    x = static.data("x", [None, 6])
    y = paddle.nn.Linear(6, 6)(x)
    main, startup = (static.Program.from_json(p.to_json()) for p in static_mode)
    with paddle.utils.unique_name.guard(), static.program_guard(main, startup):
        paddle.nn.Linear(6, 6)(main.global_block().var(y.name))
    assert len(main.all_parameters()) == 4
    assert main.num_ops == 2


def test_sequences_keep_their_offsets(static_mode):
    static.data("x", [None, 2], lod_level=2)
    (x,) = (v for v in static.Program.from_json(static_mode[0].to_json()).list_vars() if v.name == "x")
    assert x.is_data
    assert [v.name for v in x.lod] == ["x@LOD0", "x@LOD1"]


def test_a_rate_that_the_program_computes(static_mode):
    w = paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(1.0))
    rate = static.data("rate", [1])
    SGD(rate).minimize(w.sum())
    main, startup = (static.Program.from_json(p.to_json()) for p in static_mode)
    exe, scope = static.Executor(), static.Scope()
    exe.run(startup, scope=scope)
    exe.run(main, feed={"rate": np.array([0.25], "float32")}, scope=scope)
    np.testing.assert_array_equal(np.asarray(scope.find_var(w.name).get_tensor()), [0.75, 0.75])


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=3)
NAMED = st.builds(Ref, st.text(max_size=3)) | st.builds(SizeOf, st.text(max_size=3), st.integers(0, 3))
OTHER = st.sampled_from([slice(1, None, -2), ..., range(1, 7, 2), np.dtype("bfloat16"), float])
VALUES = st.recursive(
    PLAIN | NAMED | OTHER,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$ref"), inner, max_size=3)
    ),
    max_leaves=8,
)


def _written_and_read(value):
    return ValueDecoder({}, [], lambda name: None).decode(json.loads(json.dumps(Encoder(None, {}).encode(value, "x"))))


@given(VALUES)
def test_values_of_arguments_come_back(value):
    assert repr(_written_and_read(value)) == repr(value)  # so that nan equals itself, and a tuple no list


@given(st.sets(st.booleans() | st.integers() | st.text(max_size=3)))
def test_sets_come_back(value):  # apart from the rest: equal sets can list their elements in different orders
    for each in (value, frozenset(value)):
        found = _written_and_read(each)
        assert (type(found), found) == (type(each), each)


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32", "bfloat16", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 70)])
def test_arrays_come_back(dtype, shape):
    value = (RNG.normal(size=shape) * 9).astype(dtypes.as_dtype(dtype))
    for beside in (None, {}):
        node = json.loads(json.dumps(Encoder(beside, {}).encode(value, "x")))
        files = {} if beside is None else {n: to_pairs(a) for n, a in beside.items()}
        found = ValueDecoder(files, [], lambda name: None).decode(node)
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_what_optimizers_share_stays_shared(static_mode):
    a, b = (paddle.create_parameter([2], "float32") for _ in range(2))
    rate = StepDecay(0.1, 1)
    SGD(rate).minimize(a.sum())
    Momentum(rate).minimize(b.sum())
    main = static.Program.from_json(static_mode[0].to_json())
    first, second = (op.optimizer for op in main.global_block().ops if op.kind == "optimize")
    assert first._scheduler is second._scheduler


def test_functions_are_refused_by_name(static_mode):
    w = paddle.create_parameter([2], "float32")
    paddle.optimizer.AdamW(0.1, apply_decay_param_fun=lambda name: True).minimize(w.sum())
    with pytest.raises(ProgramError, match=r"apply_decay_param_fun is the function .*<lambda>, which cannot"):
        static_mode[0].to_json()


def test_objects_without_a_form_are_refused_by_name(static_mode):
    w = paddle.create_parameter([2], "float32")
    w.owner = object()
    with pytest.raises(ProgramError, match=f"'{w.name}': owner is a value of class object"):
        static_mode[0].to_json()


def test_gradient_hooks_are_refused(static_mode):
    held = paddle.nn.Parameter(ROWS)
    held.register_hook(lambda g: g)
    static.data("x", [6]) * held
    with pytest.raises(ProgramError, match="gradient hooks"):
        static_mode[0].to_json()


def test_parameters_under_a_plan_are_refused(static_mode):
    paddle.create_parameter([2], "float32").layouts = {"param": 1}
    with pytest.raises(ProgramError, match="is laid out by a plan over a mesh"):
        static_mode[0].to_json()


def edited(text, change):
    """The JSON after a change, its digest made to fit."""
    body = json.loads(text)
    del body["digest"]
    change(body)
    return json.dumps({**body, "digest": xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()})


def rename_op(body):
    body["blocks"][0]["ops"][0]["name"] = "no_such_op"


def rename_kind(body):
    body["blocks"][0]["ops"][0]["op"] = "Cal"


def rename_optimizer(body):
    body["blocks"][0]["ops"][-1]["optimizer"]["$optimizer"] = "optimizer.SDG"


def later(body):
    body["version"] = VERSION + 1


def break_tag(body):
    body["blocks"][0]["gives"] = [{"$code": "exit()"}]


def break_vars(body):
    del body["blocks"][0]["vars"][0]["shape"]


def break_reference(body):
    body["blocks"][0]["gives"] = [{"$var": "nowhere"}]


def break_array(body):
    body["blocks"][0]["gives"] = [{"$array": {"dtype": "float32", "shape": [2], "name": "gone"}}]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (rename_op, ProgramError, "calls 'no_such_op', which is not declared here"),
        (rename_kind, CheckpointError, "operation 'Cal', which is not known here; did you mean 'Call'"),
        (rename_optimizer, CheckpointError, "the optimizer 'optimizer.SDG', which is not declared here; did you mean"),
        (later, CheckpointError, rf"format version {VERSION + 1}; this polyreme reads {VERSION}, upgrade it"),
        (break_tag, CheckpointError, r"a value of kind '\$code', which is not known here"),
        (break_vars, CheckpointError, r"malformed \(KeyError: 'shape'\)"),
        (break_reference, CheckpointError, "refers to a variable 'nowhere'"),
        (break_array, CheckpointError, "the values of 'gone' are missing"),
    ],
)
def test_a_file_that_is_not_as_it_should_be(change, error, match, static_mode):
    w = paddle.create_parameter([2], "float32")
    SGD(0.1).minimize((w * 2).sum())
    text = edited(static_mode[0].to_json(), change)
    with pytest.raises(error, match=match):
        static.Program.from_json(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "it may be cut off"),
        ("[]", "format is not 'polyreme.program'"),
        ('{"format": "polyreme.program", "version": 1}', "was changed since it was written"),
    ],
)
def test_text_that_is_no_program(text, match):
    with pytest.raises(CheckpointError, match=match):
        static.Program.from_json(text)


def test_arrays_that_do_not_fit(static_mode):
    beside = {}
    x = static.data("x", [100])
    x * paddle.to_tensor(np.ones(100, "float32"))
    text = static_mode[0].to_json(beside)
    (name,) = beside
    with pytest.raises(CheckpointError, match=rf"'{name}' is float32\[3\], the Program says float32\[100\]"):
        static.Program.from_json(text, {name: np.ones(3, "float32")})


def test_bytes_that_are_no_program():
    with pytest.raises(CheckpointError, match=r"Program\.parse_from_string: is a pickle"):
        static.Program.parse_from_string(b"\x80\x04abcdefgh")


def test_paddle_save_writes_a_program_that_paddle_load_gives_back(static_mode, tmp_path):
    program, startup = static.Program(), static.Program()
    with static.program_guard(program, startup):
        scores = static.nn.fc(static.data("x", [None, 6]), 3)
    exe = static.Executor()
    exe.run(startup)
    want = exe.run(program, feed={"x": ROWS}, fetch_list=[scores])[0]
    paddle.save(program, tmp_path / "net.pdmodel")
    both = io.BytesIO()
    paddle.save(program, both)
    paddle.save({"epoch": 3}, both)
    both.seek(0)
    for loaded in (paddle.load(tmp_path / "net.pdmodel"), paddle.load(both)):
        assert isinstance(loaded, static.Program)
        assert str(loaded) == str(program)
        np.testing.assert_array_equal(exe.run(loaded, feed={"x": ROWS}, fetch_list=[scores.name])[0], want)
    assert paddle.load(both) == {"epoch": 3}
    both.seek(0)
    for path in (tmp_path / "net.pdmodel", both):
        with pytest.raises(ConfigError, match=r"load\(return_numpy=True\): the file holds a Program"):
            paddle.load(path, return_numpy=True)
    torn = bytearray((tmp_path / "net.pdmodel").read_bytes())
    torn[-5] ^= 1
    with pytest.raises(CheckpointError, match="digest"):
        paddle.load(io.BytesIO(bytes(torn)))
