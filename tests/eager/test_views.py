"""Parts of a Tensor that an index of ints and slices gives: writes to one show in the other."""

import copy
import gc
import pickle

import numpy as np
import pytest

import polyreme as paddle


def counted():
    return paddle.arange(6, dtype="float32").reshape([2, 3])


def _chained(x):
    x[0][1] = 9


def _filled(x):
    x[:, 1].fill_(9)


def _deep(x):
    row = x[1]
    row[1:][0:1].add_(paddle.to_tensor(5.0))


def _valued(x):
    x[1].set_value(paddle.zeros([3]))


def _assigned(x):
    paddle.assign(paddle.zeros([3]), x[0])


def _iterated(x):
    for row in x:
        row.scale_(2.0)


def _new_dim(x):
    x[None, ..., 2][0, 1] = 7


def _all_of_it(x):
    x[()].fill_(1)


WRITES = {
    _chained: [[0, 9, 2], [3, 4, 5]],
    _filled: [[0, 9, 2], [3, 9, 5]],
    _deep: [[0, 1, 2], [3, 9, 5]],
    _valued: [[0, 1, 2], [0, 0, 0]],
    _assigned: [[0, 0, 0], [3, 4, 5]],
    _iterated: [[0, 2, 4], [6, 8, 10]],
    _new_dim: [[0, 1, 2], [3, 4, 7]],
    _all_of_it: [[1, 1, 1], [1, 1, 1]],
}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("captured", [False, True])
def test_what_is_written_to_a_part_is_written_to_the_tensor(write, captured):
    x = counted()
    (paddle.jit.to_static(write) if captured else write)(x)
    assert x.tolist() == WRITES[write]


def test_a_part_follows_the_tensor_and_other_parts():
    x = counted()
    row, column, other = x[0], x[:, 1], x[1]
    x[0, 1] = 7
    assert (row.tolist(), column.tolist(), other.tolist()) == ([0, 7, 2], [7, 4], [3, 4, 5])
    row.zero_()
    assert (x.tolist(), column.tolist()) == ([[0, 0, 0], [3, 4, 5]], [0, 4])


def test_gradients_pass_through_what_a_part_was_given():
    leaf = paddle.to_tensor([1.0, 2.0, 3.0], stop_gradient=False)
    x = paddle.zeros([2, 3])
    x[1].add_(leaf * leaf)
    (x * x).sum().backward()
    np.testing.assert_allclose(leaf.grad.numpy(), 4 * np.array([1.0, 8.0, 27.0]))


def test_a_part_of_a_leaf_that_wants_a_gradient_goes_its_own_way():
    x = counted()
    x.stop_gradient = False
    row = x[0]
    row[1] = 9
    row.sum().backward()
    assert (x[0].tolist(), x.grad.tolist()) == ([0, 1, 2], [[1, 0, 1], [0, 0, 0]])
    with paddle.no_grad():
        x[0].zero_()
    assert x.tolist() == [[0, 0, 0], [3, 4, 5]]


def _by_array(x):
    return x[paddle.to_tensor([0])]


def _copied(x):
    return copy.deepcopy(x)[0]


def _pickled(x):
    return pickle.loads(pickle.dumps(x[0]))


def _reshaped(x):
    row = x[0]
    x.reshape_([3, 2])
    return row


def _cast(x):
    row = x[0]
    row.cast_("float64")
    return row


@pytest.mark.parametrize("take", [_by_array, _copied, _pickled, _reshaped, _cast, lambda x: x[0].clone()])
def test_what_is_no_view_is_a_value_of_its_own(take):
    x = counted()
    take(x).zero_()
    assert x.flatten().tolist() == list(range(6))


def test_parts_hold_no_tensor_in_memory():
    x = counted()
    row = x[0][1:]
    del x
    gc.collect()
    assert row._views.whole() is None
    row[0:1].zero_()
    assert row.tolist() == [0, 2]


def test_a_part_of_captured_code_that_has_ended_is_left_alone():
    length, parts = paddle.to_tensor(np.int32([3, 4])), []
    read = paddle.jit.to_static(lambda: parts.append(length[:1]) or length.sum())
    assert int(read()) == 7
    add = paddle.jit.to_static(lambda: length.add_(1).sum())
    assert int(add()) == 9
    length.add_(1)
    assert length.tolist() == [5, 6]


def test_a_write_to_one_entry_leaves_parts_of_others_as_they_are():
    """They are not taken again, so that a loop that fills rows and keeps them costs no square of its steps."""
    x = paddle.zeros([3, 2])
    first, last, rest = x[0], x[2], x[1:]
    array = last._array
    x[0] = 1.0
    assert last._array is array
    x[-1] = 2.0
    assert (first.tolist(), last.tolist(), rest.tolist()) == ([1, 1], [2, 2], [[0, 0], [2, 2]])
