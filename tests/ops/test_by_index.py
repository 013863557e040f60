"""Ids of 64 bits in Programs and artefacts; sums over indices of 16-bit values, which keep their small terms."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme import static
from polyreme.eager.tensor import to_tensor
from polyreme.nn import functional as F

FAR = np.array([0, 2**32 + 1])


def test_an_id_beyond_32_bits_names_no_row_in_a_program_and_in_an_artefact(tmp_path):
    # the size that ids are compared with is open in the artefact
    spec = [static.InputSpec([None, 2], "float32", "x"), static.InputSpec([None], "int64", "i")]
    paddle.jit.save(paddle.jit.to_static(lambda x, i: x[i], input_spec=spec), tmp_path / "m")
    table = np.ones((2, 2), "float32")
    results = [paddle.jit.load(tmp_path / "m")(to_tensor(table), to_tensor(FAR)).numpy()]
    paddle.enable_static()
    try:
        with static.program_guard(static.Program()):
            x, i = static.data("x", [None, 2]), static.data("i", [None], "int64")
            out = F.embedding(i, x)
            results += static.Executor().run(feed={"x": table, "i": FAR}, fetch_list=[out])
    finally:
        paddle.disable_static()
    for result in results:
        np.testing.assert_array_equal(np.isnan(result), [[False] * 2, [True] * 2])


def test_an_id_beyond_32_bits_trains_no_row():
    net = paddle.nn.Embedding(4, 2)
    sgd = paddle.optimizer.SGD(1.0, parameters=net.parameters())
    before = net.weight.numpy()

    @paddle.jit.to_static
    def step(ids):
        net(ids).sum().backward()
        sgd.step()
        sgd.clear_grad()

    step(to_tensor(FAR))
    np.testing.assert_array_equal(before - net.weight.numpy(), [[1, 1], [0, 0], [0, 0], [0, 0]])


HITS = 4096  # ones added one by one stop at 256 in bfloat16, at 2048 in float16
READS = {
    "x[i]": lambda x, i: x[i],
    "x[:, i]": lambda x, i: x[:, i],
    "gather": lambda x, i: paddle.gather(x, i),
    "index_select": lambda x, i: paddle.index_select(x, i, 1),
    "index_sample": lambda x, i: paddle.index_sample(x, i.unsqueeze(0)),
    "take_along_axis": lambda x, i: paddle.take_along_axis(x, i.unsqueeze(1), 0),
    "gather_nd": lambda x, i: paddle.gather_nd(x, i.unsqueeze(1)),
    "take": lambda x, i: paddle.take(x, i, "wrap"),
    "embedding": lambda x, i: F.embedding(i, x),
    "repeat_interleave": lambda x, i: paddle.repeat_interleave(x, to_tensor(np.array([HITS])), 0),
    "send_uv": lambda x, i: paddle.geometric.send_uv(x, x, i, i),
    "as_strided": lambda x, i: paddle.as_strided(x, [HITS], [0]),
}
ADDS = {
    "scatter": lambda x, i, ones: paddle.scatter(x, i, ones, False),
    "index_add": lambda x, i, ones: paddle.index_add(x, i, 0, ones),
    "scatter_nd_add": lambda x, i, ones: paddle.scatter_nd_add(x, i.unsqueeze(1), ones),
    "index_put": lambda x, i, ones: paddle.index_put(x, [i], ones, True),
    "put_along_axis": lambda x, i, ones: paddle.put_along_axis(x, i.unsqueeze(1), ones, 0, "add", broadcast=False),
    "bincount": lambda x, i, ones: paddle.bincount(i, ones.reshape([-1])),
    "histogram": lambda x, i, ones: paddle.histogram(i, 1, -1, 1, weight=ones.reshape([-1])),
    "segment_sum": lambda x, i, ones: paddle.geometric.segment_sum(ones, i),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("call", READS.values(), ids=READS)
def test_gradients_of_16_bits_add_up_where_an_index_repeats(call):
    x = to_tensor(np.zeros((1, 1)), dtype="bfloat16", stop_gradient=False)
    out = call(x, to_tensor(np.zeros(HITS, "int64")))
    out.sum().backward()
    assert x.grad.dtype == "bfloat16"
    assert float(x.grad) == out.size * (2 if call is READS["send_uv"] else 1)


@pytest.mark.parametrize("call", ADDS.values(), ids=ADDS)
def test_values_of_16_bits_add_up_where_an_index_repeats(call):
    x, ones = (to_tensor(np.full((n, 1), v), dtype="float16") for n, v in ((1, 0), (HITS, 1)))
    total = call(x, to_tensor(np.zeros(HITS, "int64")), ones)
    assert total.dtype == "float16"
    assert float(total) == HITS


def test_a_gradient_scaled_by_the_number_of_hits_counts_them_all():
    x = to_tensor(np.zeros((1, 1)), dtype="bfloat16", stop_gradient=False)
    F.embedding(to_tensor(np.zeros(HITS, "int64")), x, scale_grad_by_freq=True).sum().backward()
    assert float(x.grad) == 1
