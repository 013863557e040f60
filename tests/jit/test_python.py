"""Python that depends on Tensors: captured, it does what it does eagerly, or is refused with its line."""

import itertools

import numpy as np
import pytest

import polyreme as paddle
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError
from polyreme.jit import to_static
from tests.jit import table_data, table_statements  # noqa: F401  (they fill the table)
from tests.jit.agreement import CASES, check


@pytest.mark.slow_cases("functions_given_to_map_and_reduce", "nested_return", "recursion", "with_around")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_captured_agrees_with_eager(case):
    check(case)


# refused, with the line


def grows_in_while(x):
    out = [x]
    while x < 10:
        out.append(x)
        x = x * 2
    return out


def grows_before_a_break(x):
    out = []
    for i in range(5):
        if x > i:
            break
        out.append(x + i)
    return len(out)


def key_in_branch(x):
    seen = {}
    if x > 0:
        seen["a"] = 1
    return len(seen)


def element_of_set(x):
    seen = {1}
    if x > 0:
        seen.add(2)
    return len(seen)


class Thing:
    pass


def attribute_in_branch(x):
    thing = Thing()
    if x > 0:
        thing.v = x
    return thing.v


def attribute_in_loop(x):
    thing = Thing()
    while x < 10:
        thing.v = x
        x = x * 2
    return thing.v


def test_changes_a_list(x):
    count = [0]

    def counted():
        count[0] += 1
        return count[0]

    while x < counted():
        x = x + 0.5
    return x


def zip_of_range(x):
    for i, _ in zip(range(x.astype("int64")), [1, 2], strict=False):
        x = x + i
    return x


def list_of_range(x):
    return sum(range(x.astype("int64")))


def calls_itself(x):
    if x > 0:
        return calls_itself(x - 1) + 1
    return x


def raise_in_try(x):
    try:
        if x > 0:
            raise ValueError("positive")
    except ValueError:
        return x * 2
    return x


def which_exception(x):
    if x > 0:
        raise ValueError("a")
    else:  # noqa: RET506  (the shape tested)
        raise KeyError("b")


def condition_in_comprehension(x):
    return sum([row for row in paddle.stack([x, -x]) if row > 0])


def text_of_a_tensor(x):
    return {f"{x}": 1}


def inner_generator(x):
    def positive():
        for row in (x, -x):
            if row > 0:
                yield row

    return sum(positive())


def rows_over(x):
    if x > 0:
        yield x


def generator(x):
    return sum(rows_over(x))


def walrus_in_operand(x):
    if x > 0 and (y := x * 2) > 1:
        return y
    return x


def walrus_and_else(x):
    while (x := x * 2) < 10:
        x = x + 1
    else:
        x = x * 0
    return x


def number_of(x):
    return range(int(x))


def inner_coroutine(x):
    async def later():
        return x

    return x if x > 0 else later


def except_group(x):
    try:
        y = x if x > 0 else -x
    except* ValueError:
        y = x
    return y


REFUSED = [
    (grows_in_while, r":{2}: a while loop .* 'out', a list, has 1 element before a step but 2 elements after it"),
    (grows_before_a_break, r":{2}: an if .* 'out', a list, has \d elements? after the true side .* Python number of"),
    (key_in_branch, r":{2}: .* 'seen', a dict, has keys \['a'\] after the true side but keys \[\] after the false"),
    (element_of_set, r":{2}: .* 'seen', a set, has 2 elements after the true side but 1 element after the false"),
    (attribute_in_branch, r"variable 'Thing.v' is defined only in the true branch of an if at \S+:{2}"),
    (attribute_in_loop, r"variable 'Thing.v' is first defined inside a while loop at \S+:{2}"),
    (test_changes_a_list, r":{7}: the test of a while loop changes a list, dict, set or attribute"),
    (zip_of_range, r":{1}: how many numbers this range\(\) has depends on a Tensor"),
    (list_of_range, r":{1}: how many numbers this range\(\) has depends on a Tensor"),
    (
        calls_itself,
        r":{1}: branches and loops on Tensors are nested more than 16 deep; a function whose recursion ends by",
    ),
    (raise_in_try, r":{3}: whether this ValueError is raised depends on a Tensor, and the try around it"),
    (which_exception, r":\d+: which of two exceptions is raised \(ValueError\('a'\) or KeyError\('b'\)\)"),
    (condition_in_comprehension, r":{1}: bool\(Tensor\).* needs the value on the host"),
    (text_of_a_tensor, r":{1}: this text holds the value of a Tensor, which is not known"),
    (inner_generator, r"needs the value on the host.*not converted here: line \d+: generators are not converted"),
    (generator, r"needs the value on the host.*not converted here: generators and coroutines are not converted"),
    (walrus_in_operand, r":{1}: .*line {1}: := in an operand that may not be evaluated is not converted"),
    (walrus_and_else, r":{1}: .*line {1}: a while loop with both := in its test and an else is not converted"),
    (inner_coroutine, r":{4}: .*line {1}: coroutines are not converted"),
    (except_group, r":{2}: .*line {1}: except\* is not converted"),
    (number_of, r":{1}: int\(Tensor\) needs the value on the host"),
]


@pytest.mark.parametrize(("fn", "message"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_refusals_say_what_and_where(fn, message):
    lines = [fn.__code__.co_firstlineno + i for i in range(10)]
    with pytest.raises(CaptureError, match=message.format(*lines)):
        to_static(fn)(to_tensor(2.0))


test_changes_a_list.__test__ = False


def test_a_refusal_leaves_objects_as_they_were():
    items, table = [1.0], {"a": 1}

    @to_static
    def fn(x):
        if x > 0:
            items[0] = x
            table["a"] = 2
        else:
            items.append(x)
        return x

    with pytest.raises(CaptureError, match="'items', a list, has 1 element"):
        fn(to_tensor(1.0))
    assert items == [1.0]
    assert table == {"a": 1}


def test_what_is_made_inside_a_branch_does_not_have_it_traced_again():
    runs = itertools.count()

    @to_static
    def fn(x):
        if x > 0:
            next(runs)
            parts, table = [x], dict(a=x)
            parts.append(x * 2)
            table["b"] = [row * 2 for row in parts]
            table["b"].append(x)
            thing = Thing()
            thing.v = table["b"][0]
            x = thing.v + table["b"][2]
        return x

    assert fn(to_tensor(2.0)).item() == 6.0
    assert next(runs) == 2  # to find the state, and to make the program


def test_state_of_a_layer_in_branches_and_loops():
    class Counting(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", to_tensor(0.0))
            self.scale = self.create_parameter([1], default_initializer=paddle.nn.initializer.Constant(2.0))

        def forward(self, x):
            for row in x:
                if row.sum() > 0:
                    self.seen.set_value(self.seen + row.sum())
                    x = x * self.scale
            return x

    plain, captured = Counting(), to_static(Counting())
    for rows in ([[1.0, -2.0], [3.0, 1.0]], [[-1.0, 0.0], [0.0, 0.5]]):
        for layer in (plain, captured):
            layer(to_tensor(rows)).sum().backward()
        assert captured.seen.item() == plain.seen.item()
        np.testing.assert_allclose(captured.scale.grad.numpy(), plain.scale.grad.numpy(), rtol=1e-6)
