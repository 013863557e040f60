"""Passes: each alone, by the listing before and after, and by what the Program then computes."""

import numpy as np
import pytest

import polyreme as paddle
import polyreme.nn.functional as F
from polyreme import static
from polyreme.errors import ConfigError, ProgramError
from polyreme.jit.control_flow import cond, while_loop
from polyreme.static import passes

X = np.random.default_rng(0).integers(-3, 4, (4, 3)).astype("float32")  # sums of integers are exact in any order


def ops(program):
    return [[op.kind for op in block.ops] for block in program.blocks]


def lines(text):
    """The operations in a listing, without the names of their results."""
    return [line.strip().partition(" = ")[2] or line.strip() for line in text.splitlines()]


def run(program, fetch, feed=None, seed=5):
    paddle.seed(seed)
    scope = static.Scope()
    exe = static.Executor()
    exe.run(static.default_startup_program(), scope=scope)
    return [exe.run(program, feed, fetch, scope=scope) for _ in range(2)]


def same(program, changed, fetch, feed=None):
    """Two runs of both give the same values, whatever they write and draw."""
    for one, other in zip(run(program, fetch, feed), run(changed, fetch, feed), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_table_runs_passes_in_order_and_leaves_the_program_alone(static_mode):
    main, _ = static_mode
    y = (static.data("x", [2]) + paddle.ones([2]) * 2) * 1 + 0
    before, version = str(main), main.version
    done = passes.apply(main, ["constant_folding", "identity", ("dead_code", {})], fetch=y)
    assert (str(main), main.version) == (before, version)
    assert ops(done) == [["assign", "add", "add"]]
    assert all(p.description for p in passes.PASSES.values())
    assert passes.show(done, "identity") == ""
    with pytest.raises(ConfigError, match="no pass 'dead_coed'; did you mean 'dead_code'"):
        passes.apply(main, ["dead_coed"])
    with pytest.raises(ConfigError, match=r"no pass of \['dead_code'\] has the options \['level'\]"):
        passes.apply(main, ["dead_code"], level="O2")
    with pytest.raises(ConfigError, match=r"amp: unknown options \['limit'\]"):
        passes.apply(main, [("amp", {"limit": 1})])
    with pytest.raises(TypeError, match="dead_code takes a Program, got str"):
        passes.PASSES["dead_code"]("main")
    with pytest.raises(ProgramError, match="no variable 'z'"):
        passes.apply(main, "dead_code", fetch=["z"])


def test_constants_are_computed_before_the_program_runs(static_mode):
    main, _ = static_mode
    x = static.data("x", [None, 3])
    many, drawn = paddle.ones([2000]) * 2, paddle.rand([3]) * 1
    y = x * (paddle.arange(3, dtype="float32") + 1)
    changed = passes.apply(main, "constant_folding", fetch=[y])
    assert passes.show(main, "constant_folding") == "\n".join(
        [
            "--- before", "+++ after", "@@ -3,7 +3,7 @@",
            "   %multiply_0.tmp_0: float32[2000] = multiply(%ones_0.tmp_0, 2)",
            "   %rand_0.tmp_0: float32[3] = rand([3])",
            "   %multiply_1.tmp_0: float32[3] = multiply(%rand_0.tmp_0, 1)",
            "-  %arange_0.tmp_0: float32[3] = arange(3, dtype='float32')",
            "-  %add_0.tmp_0: float32[3] = add(%arange_0.tmp_0, 1)",
            "+  %arange_0.tmp_0: float32[3] = assign(float32[3] [0., 1., 2.])",
            "+  %add_0.tmp_0: float32[3] = assign(float32[3] [1., 2., 3.])",
            "   %multiply_2.tmp_0: float32[-1, 3] = multiply(%x, %add_0.tmp_0)",
            " }",
        ]
    )  # fmt: skip
    same(main, changed, [y, many, drawn], {"x": X})


def test_held_tensors_are_constants_only_if_one_says_so(static_mode):
    main, _ = static_mode
    paddle.disable_static()
    held, moved = paddle.to_tensor([2.0]), paddle.to_tensor([1.0])
    paddle.enable_static()
    y, z = held * 3, moved * 3
    paddle.assign(y, moved)
    assert ops(passes.constant_folding(main))[0] == ["multiply", "multiply", "assign", "assign"]
    folded = passes.constant_folding(main, held=True)
    assert ops(folded)[0] == ["assign", "multiply", "assign", "assign"]
    assert run(folded, [y, z])[1][0] == [6.0]


def test_shapes_are_left_to_the_compiler(static_mode):
    main, _ = static_mode
    x = static.data("x", [4, 3])
    y = paddle.reshape(x, [paddle.shape(x)[0] * 3])
    changed = passes.constant_folding(main, [y])
    assert str(changed) == str(main)
    same(main, changed, [y], {"x": X})


def test_what_gives_back_its_input_goes(static_mode):
    main, _ = static_mode
    x = static.data("x", [4, 3])
    y = paddle.assign(x)
    y = F.dropout(paddle.scale(y, 1.0) * 1 / 1 - 0, 0.5, training=False)
    y = paddle.cast(paddle.transpose(paddle.reshape(y, [4, 3]), [0, 1]), "float32")
    kept = y * 1
    y = paddle.reshape(paddle.transpose(y + 0, [1, 0]) * 2, [4, 3])
    changed = passes.identity(main, [kept, y])
    assert ops(changed) == [["multiply", "add", "transpose", "multiply", "reshape"]]
    same(main, changed, [kept, y], {"x": X})


def test_copies_of_what_is_written_and_of_what_gradients_are_taken_of_stay(static_mode):
    main, _ = static_mode
    w = paddle.create_parameter([3], "float32")
    before, x = paddle.assign(w), static.data("x", [4, 3])
    loss = (x * w).sum()
    (first,) = static.gradients((x * paddle.assign(w) * w).sum(), [w])
    paddle.optimizer.SGD(0.5).minimize(loss)
    changed = passes.identity(main, [before, loss])
    assert ops(changed)[0].count("assign") == 2
    same(main, changed, [before, first, loss, w], {"x": X})
    inner = main.clone()
    copied = paddle.assign(x)
    copied.stop_gradient = False
    static.gradients((copied * 2 + x).sum(), copied)
    assert ops(passes.identity(main))[0].count("assign") == ops(inner)[0].count("assign") + 1


def test_equal_calls_are_made_once(static_mode):
    main, _ = static_mode
    x = static.data("x", [4, 3])
    a, b = F.relu(x * 2.0), F.relu(x * 2.0)
    c, d = x * 2, paddle.rand([3]) + paddle.rand([3])
    with paddle.amp.auto_cast(dtype="bfloat16"):
        e = x * 2.0
    y = cond(x.sum() > 0, lambda: F.relu(x * 2.0) + 1, lambda: F.relu(x * 3.0) + F.relu(x * 3.0))
    total = a + b
    changed = passes.common_subexpression(main, [c, d])
    assert ops(changed) == [
        ["multiply", "relu", "multiply", "rand", "rand", "add", "multiply", "sum", "greater_than", "cond", "add"],
        ["add"],
        ["multiply", "relu", "add"],
    ]
    assert "add(%relu_0.tmp_0, 1)" in str(changed)
    assert "add(%relu_0.tmp_0, %relu_0.tmp_0)" in str(changed)
    same(main, changed, [c, d, e, y, total], {"x": X})


def test_a_write_between_keeps_equal_calls_apart(static_mode):
    main, _ = static_mode
    w = paddle.create_parameter([3], "float32")
    w.stop_gradient = True
    first, second = w * 2, w * 2
    paddle.assign(second + 1, w)
    third = w * 2
    changed = passes.common_subexpression(main, [third])
    assert ops(changed)[0].count("multiply") == 2
    same(main, changed, [third, w], {})
    both = first + second
    assert ops(passes.common_subexpression(main, [first, second]))[0].count("multiply") == 3
    same(main, passes.common_subexpression(main, [both]), [both, third, w], {})


def test_gradients_to_one_of_two_equal_values_stay_its_own(static_mode):
    main, _ = static_mode
    x = static.data("x", [4, 3])
    x.stop_gradient = False
    a, b = x * 2, x * 2
    (grad,) = static.gradients((a * 3 + b * 5).sum(), [a])
    changed = passes.common_subexpression(main, [grad])
    assert str(changed) == str(main)
    same(main, changed, [grad], {"x": X})


def test_dead_code_goes_and_effects_stay(static_mode):
    main, _ = static_mode
    x = static.data("x", [4, 3])
    net = paddle.nn.BatchNorm1D(3)
    unused = net(x) * 2  # writes the running statistics
    paddle.rand([2])  # moves the stream of random numbers
    two = cond(x.sum() > 0, lambda: (x + 1, x * 3 + 0 * x.mean()), lambda: (x - 1, x * 4))
    cond(x.sum() > 0, lambda: x, lambda: -x)
    y = F.dropout(two[0], 0.5)
    changed = passes.dead_code(main, [y])
    assert ops(changed) == [
        ["batch_norm", "rand", "sum", "greater_than", "cond", "dropout"], ["add"], ["subtract"],
    ]  # fmt: skip
    assert len(main.blocks) == 5, "the Program itself is as it was"
    assert [b.idx for b in changed.blocks] == [0, 1, 2]
    same(main, changed, [y, net._mean], {"x": X})
    with pytest.raises(ProgramError, match="no variable"):
        run(changed, [unused.name], {"x": X})


def test_gradients_that_nothing_reads_go(static_mode):
    main, _ = static_mode
    v, w = (paddle.create_parameter([3], "float32") for _ in range(2))
    loss = (static.data("x", [4, 3]) * v * w).sum()
    pairs = static.append_backward(loss)
    changed = passes.dead_code(main, [pairs[1][1]])
    (backward,) = [op for op in changed.global_block().ops if op.kind == "backward"]
    assert (backward.inputs, backward.outputs) == ([w.name], [pairs[1][1].name])
    same(main, changed, [pairs[1][1]], {"x": X})
    assert ops(passes.dead_code(main, [loss])) == [["multiply", "multiply", "sum"]]


def test_prune_leaves_what_a_result_needs(static_mode):
    main, _ = static_mode
    x, label = static.data("x", [None, 3]), static.data("label", [None, 1])
    hidden = F.relu(paddle.nn.Linear(3, 4)(x))
    unused = paddle.nn.Linear(3, 2)
    out = paddle.nn.Linear(4, 1)(F.dropout(hidden, 0.5))
    loss = ((out - label) ** 2).mean() + unused(x).sum()
    paddle.optimizer.SGD(0.1).minimize(loss)
    test = main.clone(for_test=True)
    changed = passes.prune(test, [out])
    assert ops(changed) == [["linear", "relu", "dropout", "linear"]]
    assert [v.name for v in changed.list_vars() if getattr(v, "is_data", False)] == ["x"]
    assert len(changed.all_parameters()) == 4
    assert [a.tolist() for a in run(changed, [out], {"x": X})[1]] == [
        a.tolist() for a in run(test, [out], {"x": X, "label": X[:, :1]})[1]
    ]
    inside = passes.prune(test, [out], feed=[hidden])
    assert ops(inside) == [["dropout", "linear"]]
    assert len(inside.all_parameters()) == 2
    assert run(inside, [out], {hidden.name: np.zeros((5, 4), "float32")})[0][0].tolist() == [[0.0]] * 5


def test_loops_keep_what_they_carry(static_mode):
    main, _ = static_mode
    x = static.data("x", [4, 3])
    count, total = paddle.zeros([1], "int64"), paddle.assign(x)
    limit = paddle.ones([1], "int64") * 3

    def body(i, t):
        paddle.increment(count)
        return [i + 1, (t * 1 + paddle.ones([3]) * 2) + 0 * (x + x)]

    i, y = while_loop(lambda i, t: i < limit, body, [count, total], maximum_iterations=4)
    changed = passes.apply(main, ["constant_folding", "identity", "common_subexpression", "dead_code"], [i, y, count])
    assert "assign(int64[1] [3])" in str(changed)
    assert "assign(float32[3] [2., 2., 2.])" in str(changed)
    assert str(changed).count("multiply(") == str(main).count("multiply(") - 3
    same(main, changed, [i, y, count], {"x": X})
