"""Statements and functions that depend on Tensors, as users write them: the cases of test_python."""

# ruff: noqa: B023, F841, PIE804, PLW0603, SIM102, UP008  (written as users write)
import contextlib
import functools

import polyreme as paddle
from polyreme.jit import while_loop
from tests.jit.agreement import case

V = (-2.5, 0.5, 3.0)
V3 = ([1.0, -2.0, 3.0], [-1.0, 5.0, 0.5], [0.1, 0.2, 0.3])
N = (0, 1, 5)


@case(*V3)
def nested_return(x):
    for row in x:
        if row > 0:
            for k in range(3):
                if row > k:
                    if row * k > 2:
                        return row * k
                    row = row + 0.5
        else:
            row = row - 1
    return x.sum()


@case(*N, gradient=False)
def tensor_range_nested_return(n):
    total = n * 0
    for i in range(n):
        if i > 2:
            if total > 2:
                return total * 10
        total = total + i
    return total


@case(*V, gradient=False)
def while_break_continue(x):
    i, s = 0, x * 0
    while i < 10 + x * 0:
        i += 1
        if i % 2 == 0:
            continue
        if s > 6:
            break
        s = s + i
    return s, i


@case(*N, gradient=False)
def range_break_continue(n):
    s = n * 0
    for i in range(n):
        if i == 1:
            continue
        if i == 4:
            break
        s += i
    return s


@case(*V3)
def rows_break_continue(x):
    s = x[0] * 0
    for r in x:
        if r < 0:
            continue
        if s > 0.15:
            break
        s = s + r * r
    return s


@case(*V3)
def for_else(x):
    s = x[0] * 0
    for r in x:
        if r > 2:
            s = r
            break
    else:
        s = s - 1
    return s * x.sum()


@case(*N, gradient=False)
def while_else(n):
    i = n * 0
    while i < n:
        if i == 3:
            break
        i += 1
    else:
        i = i + 100
    return i


@case(*V3)
def for_else_return(x):
    for r in x:
        if r > 2:
            return r * 2
    else:
        y = x.sum() * 3
    return y


@case(*N, gradient=False)
def range_else(n):
    for i in range(n):
        if i == 3:
            break
    else:
        return n * 0 - 1
    return n * 2


@case(*V3)
def lambda_loop_vars(x):
    fs = []
    for k in range(3):
        fs.append(lambda z, k=k: z * k if z > 0 else z - k)
    return fs[0](x[0]) + fs[1](x[1]) + fs[2](x[2])


@case(*V3)
def nested_def_loop(x):
    y = x[0]
    for k in range(2):

        def inner(z):
            if z > k:
                return z * k
            return z - y

        y = y + inner(x[k])
    return y


@case(*V)
def nonlocal_counter(x):
    count = 0.0

    def inc(z):
        nonlocal count
        if z > 0:
            count = count + z
        else:
            count = count - 1.0
        return z * 2

    y = inc(x) + inc(x - 1)
    return y + count


@case(*V)
def nonlocal_tensor(x):
    acc = x * 0

    def add(z):
        nonlocal acc
        acc = acc + z
        if acc > 1:
            acc = acc * 2

    for k in range(3):
        add(x * k)
    return acc


@case(*V)
def try_around(x):
    try:
        if x > 0:
            y = x * 2
        else:
            y = x * x
        z = {}["missing"]
    except KeyError as e:
        y = y + 1
    else:
        y = y * 100
    finally:
        y = y + 2
    return y


@contextlib.contextmanager
def ctx(v):
    yield v


@case(*V)
def with_around(x):
    with ctx(3) as k, paddle.no_grad():
        if x > k:
            s = x * k
        else:
            s = x
    with ctx(4) as (m):
        for i in range(m):
            if x > i:
                return x * i + s
    return x * s


def fact(x, n):
    if n == 0:
        return x
    if x > n:
        return fact(x * 1.5, n - 1)
    return fact(x + 1, n - 1)


@case(*V)
def recursion(x):
    return fact(x, 3)


@case(*V)
def ternaries(x):
    a = x if x > 0 else (x * 2 if x > -1 else x * 3)
    return a * (2.0 if x > 1 else 3.0) + (1 if x > 0 else 0)


@case(*V)
def logic(x):
    a = 1.0 if (x > 0 and x < 2) else 2.0
    b = 1.0 if (x < 0 or x > 2) else 3.0
    c = 1.0 if not (x > 0) else 2.5
    d = 1.0 if -3 < x < 0 <= x + 3 else 2.2
    e = 1.0 if not (x > 0 and not (x > 1 or x < 0.2)) else 1.7
    return x * a * b * c * d * e


@case(*V)
def isinstance_(x):
    if isinstance(x, paddle.Tensor) and x > 0:
        return x * 2
    return x


class Base:
    def f(self, x):
        if x > 0:
            return x * 2
        return -x


class Derived(Base):
    def f(self, x):
        y = super().f(x)
        if y > 3:
            y = y + super(Derived, self).f(x)
        return y


@case(*V)
def super_call(x):
    return Derived().f(x)


def deco(f):
    @functools.wraps(f)
    def w(*a, **k):
        return f(*a, **k) * 2

    return w


def deco_arg(m):
    def d(f):
        def w(x):
            if x > 0:
                return f(x) * m
            return f(x)

        return w

    return d


@deco
@deco_arg(3)
def decorated(x):
    if x > 0:
        return x * x
    return x - 1


@case(*V)
def decorators(x):
    return decorated(x)


COUNT = 1.0


@case(*V)
def global_(x):
    global COUNT
    COUNT = 2.0
    if x > 0:
        y = x * COUNT
    else:
        y = x - COUNT
    return y


@case(*V)
def star_args(x):
    def f(*a, **k):
        if a[0] > 0:
            return a[0] * k["m"]
        return a[1]

    return f(*[x, x + 1], **{"m": 3.0})


@case(*V, gradient=False)
def while_not(x):
    done = x > 100
    while not done:
        x = x * 2 + 9
        done = x > 100
    return x


@case(*V)
def if_tensor_truth(x):
    if x:
        x = x * 2
    if x.astype("bool"):
        x = x + 1
    return x


@case(*V)
def none_return_then(x):
    def f(z, flag=None):
        if flag is None:
            return z
        if flag:
            return z * 2
        return z * 3

    return f(x) + f(x, x > 0) + f(x, True)


@case(*V)
def except_by_name(x):
    try:
        value = {"a": x}["b"]
    except (KeyError, ValueError) as error:
        value = x * len(error.args)
        if x > 0:
            value = value * 2
    return value


@case(*V)
def local_class(x):
    class Scale:
        by = 2.0

        def apply(self, y):
            if y > 0:
                return y * self.by
            return y

    return Scale().apply(x)


@case(*V)
def handed_on_under_no_grad(x):
    with paddle.no_grad():
        if x > 1:
            y = x * 2
        else:
            y = x
    return x * y


@case(*V3)
def written_outside_of_the_tape(x):
    y, z, parts = x * x, x * 3, x * 2
    with paddle.no_grad():
        y.clip_(-1, 1)
        y[0] = x[1]
    z.set_value(z.detach() * 2)
    parts[:2].set_value(x[1:])
    if x[0] > 0:
        z.data = x.detach()
    return x * y + y * z * parts


@case(*V3)
def masks_and_lists_of_tensors_as_indices(x):
    y = paddle.stack([x, x * 2, x * x])
    y[x > 0] = x
    y[y < 0] = 1.5
    i = (x > 0).astype("int64").sum() - 1
    y[[i, 0]] += x[[i, i - 1]].sum()
    return y[:, [i, 2]]


def absolute(z):
    if z > 0:
        return z
    return -z


@case(*V3)
def functions_given_to_map_and_reduce(x):
    larger = functools.reduce(lambda a, b: a if a > b else b, map(absolute, x))
    return larger * sum(map(absolute, [x[0], x[1]]))


@case(*V, gradient=False)
def while_true_until_a_tensor_says_stop(x):
    steps = 0
    while True:
        x = x * 2 + 8
        if x > 20:
            break
        steps += 1
    while True:
        if x < 0:
            return x, steps
        x = x - 7


@case(*V)
def bounded_loop_under_no_grad(x):
    with paddle.no_grad():
        (y,) = while_loop(lambda y: y < 2, lambda y: y * 2, [x], maximum_iterations=4)
    return x * y
