"""LoDTensor: what divides rows and what does not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.core.devices.place import CPUPlace
from polyreme.errors import DeviceError, DTypeError, ShapeError
from polyreme.fluid import LoDTensor, LoDTensorArray, create_lod_tensor, create_random_int_lodtensor
from polyreme.sequences.lod_tensor import lengths_to_offsets, offsets_to_lengths

CPU = CPUPlace()
LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def rows(n, width=1):
    return np.arange(n * width, dtype="float32").reshape(n, width)


@given(LENGTHS)
def test_lengths_and_offsets_say_the_same(lengths):
    offsets = lengths_to_offsets(lengths)
    assert offsets[0] == 0
    assert offsets[-1] == sum(lengths)
    assert offsets == sorted(offsets)
    assert offsets_to_lengths(offsets) == lengths


@given(st.data(), LENGTHS)
def test_nested_levels_keep_both_forms(data, inner):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(inner)), max_size=3)))
    outer = offsets_to_lengths([0, *cuts, len(inner)])
    tensor = create_lod_tensor(rows(sum(inner)), [outer, inner], CPU)
    assert tensor.recursive_sequence_lengths() == [outer, inner]
    assert tensor.lod() == [lengths_to_offsets(outer), lengths_to_offsets(inner)]
    assert tensor.has_valid_recursive_sequence_lengths()
    again = LoDTensor()
    again.set(tensor, CPU)
    again.set_lod(tensor.lod())
    assert again.recursive_sequence_lengths() == [outer, inner]


@given(LENGTHS, st.integers(-3, 3).filter(bool))
def test_lengths_that_do_not_add_up_are_refused(lengths, more):
    tensor = LoDTensor()
    tensor.set(rows(max(sum(lengths) + more, 0)), CPU)
    if tensor.shape()[0] == sum(lengths):
        return
    with pytest.raises(ShapeError, match=rf"level 0 divides {sum(lengths)} entries, there are \d+ rows"):
        tensor.set_recursive_sequence_lengths([lengths])
    assert tensor.lod() == []


@pytest.mark.parametrize(
    ("lod", "match"),
    [
        ([[0, 3, 2, 5]], r"level 0 has offsets \[0, 3, 2, 5\], which fall"),
        ([[1, 5]], "begin with 0"),
        ([[0]], "hold one sequence or more"),
        ([[0, 3], [0, 2, 5]], "level 0 divides 3 entries, there are 2 sequences of level 1"),
        ([0, 5], "begin with 0 and hold one"),
        ([["a"]], "needs one list of integers for each level"),
        (5, "needs one list of integers for each level"),
    ],
)
def test_offsets_that_divide_nothing_are_refused(lod, match):
    tensor = LoDTensor()
    tensor.set(rows(5), CPU)
    with pytest.raises(ShapeError, match=match):
        tensor.set_lod(lod)


def test_set_keeps_a_copy_and_the_lod():
    array = rows(5)
    tensor = create_lod_tensor(array, [[2, 3]], CPU)
    array[0] = 9
    assert np.asarray(tensor)[0, 0] == 0
    assert np.asarray(tensor, "float64").dtype == "float64"
    tensor.set(rows(4), "cpu")
    assert tensor.lod() == [[0, 2, 5]]
    assert not tensor.has_valid_recursive_sequence_lengths()
    assert tensor.place.is_cpu_place()
    assert tensor.dtype == "float32"


def test_part_of_the_rows_has_no_lod():
    part = create_lod_tensor(rows(5, 2), [[2, 3]], CPU)[1:3]
    assert isinstance(part, LoDTensor)
    np.testing.assert_array_equal(part, rows(5, 2)[1:3])
    assert part.lod() == []


def test_nothing_set_has_no_rows():
    tensor = LoDTensor()
    assert tensor.shape() == [0]
    assert not tensor.has_valid_recursive_sequence_lengths()
    assert repr(tensor) == "LoDTensor(nothing set)"
    with pytest.raises(ShapeError, match=r"LoDTensor.numpy\(\): it holds nothing yet"):
        tensor.numpy()
    with pytest.raises(ShapeError, match="holds nothing yet"):
        tensor.set_lod([[0, 1]])


def test_what_cannot_be_held_is_refused():
    with pytest.raises(DTypeError, match="an array of dtype <U1"):
        LoDTensor().set(np.array(["a"]), CPU)
    with pytest.raises(DeviceError, match="is not a device"):
        LoDTensor().set(rows(1), 3)


def test_repr_shows_the_lod():
    shown = repr(create_lod_tensor(rows(2), [[2]], CPU))
    assert "shape=[2, 1], dtype=float32, place=Place(cpu), lod=[[0, 2]]" in shown


def test_ids_as_lists():
    tensor = create_lod_tensor([[1, 2, 3], [4, 5]], [[3, 2]], CPU)
    assert tensor.shape() == [5, 1]
    assert tensor.dtype == "int64"
    assert tensor.lod() == [[0, 3, 5]]
    with pytest.raises(
        ShapeError, match=r"sequences of lengths \[3\], recursive_seq_lens is \[\[2\]\]; give \[\[3\]\]"
    ):
        create_lod_tensor([[1, 2, 3]], [[2]], CPU)
    with pytest.raises(TypeError, match="a list of float64; a list holds integer ids"):
        create_lod_tensor([[1.5]], [[1]], CPU)
    with pytest.raises(TypeError, match="data is tuple"):
        create_lod_tensor((1, 2), [[2]], CPU)


def test_a_lod_tensor_divided_anew():
    tensor = create_lod_tensor(rows(5), [[2, 3]], CPU)
    assert create_lod_tensor(tensor, [[1, 1], [4, 1]], CPU).lod() == [[0, 1, 2], [0, 4, 5]]


def test_random_integers_include_both_ends():
    np.random.seed(3)
    tensor = create_random_int_lodtensor([[2, 1], [30, 40, 30]], [2], CPU, 0, 3)
    assert tensor.shape() == [100, 2]
    assert tensor.dtype == "int64"
    assert sorted(set(tensor.numpy().ravel().tolist())) == [0, 1, 2, 3]
    assert tensor.recursive_sequence_lengths() == [[2, 1], [30, 40, 30]]
    with pytest.raises(ValueError, match="low=3, high=1"):
        create_random_int_lodtensor([[1]], [1], CPU, 3, 1)
    with pytest.raises(ShapeError, match="recursive_seq_lens=\\[\\]"):
        create_random_int_lodtensor([], [1], CPU, 0, 1)


def test_array_of_lod_tensors():
    first, second = (create_lod_tensor(rows(n), [[n]], CPU) for n in (1, 2))
    array = LoDTensorArray([first])
    array.append(second)
    assert len(array) == 2
    assert [t.shape() for t in array] == [[1, 1], [2, 1]]
    array[0] = second
    assert array[-2] is second
    assert "LoDTensorArray([LoDTensor(" in repr(array)
    with pytest.raises(TypeError, match="got ndarray; it holds LoDTensors"):
        array.append(rows(1))
    with pytest.raises(IndexError, match="index 2 of 2 tensors"):
        array[2]
    with pytest.raises(IndexError, match="append adds one"):
        array[2] = first
