"""Variables, containers, attributes and builtins in code that depends on Tensors: the cases of test_python."""

# ruff: noqa: B905, RUF005  (written as users write)
import collections

import polyreme as paddle
from tests.jit.agreement import case

V = (-2.5, 0.5, 3.0)
V3 = ([1.0, -2.0, 3.0], [-1.0, 5.0, 0.5], [0.1, 0.2, 0.3])
N = (0, 1, 5)


class Box:
    scale = 1.0

    def __init__(self):
        self.n = 0

    def bump(self, x):
        if x > 0:
            self.scale = 2.0
            self.n += 1
        else:
            self.n += 2
            self.scale = 3.0
        return x * self.scale


@case(*V, gradient=False)
def dict_in_while(x):
    st = {"v": x, "n": paddle.to_tensor(0)}
    pair = (x, [x, None])
    while st["v"] < 10:
        st = {"v": st["v"] * 2 + 7, "n": st["n"] + 1}
        pair = (pair[0] + 1, [pair[1][0] - 1, None])
    return st["v"], st["n"], pair[0], pair[1][0]


@case(*V, gradient=False)
def dict_item_in_while(x):
    st = {"v": x, "n": paddle.to_tensor(0)}
    while st["v"] < 10:
        st["v"] = st["v"] * 2 + 7
        st["n"] = st["n"] + 1
    return st["v"], st["n"]


@case(*V)
def attribute_method(x):
    b = Box()
    y = b.bump(x)
    y = y + b.bump(x - 1)
    return y * b.n


@case(*V3)
def comprehension(x):
    return sum([r * r for r in x]) + sum(r if r > 0 else -r for r in x)


@case(*V3)
def dict_comprehension(x):
    d = {i: (r if r > 0 else r * 0) for i, r in enumerate(x)}
    return d[0] + d[1] * d[2]


@case(*V3)
def append_python_loop(x):
    out = []
    for i in range(3):
        if x[i] > 0:
            y = x[i] * 2
        else:
            y = -x[i]
        out.append(y)
    return paddle.stack(out).sum() * len(out)


@case(*V)
def append_both(x):
    out = [x]
    if x > 0:
        out.append(x * 2)
    else:
        out.append(x * 3)
        out[0] = x * 5
    return out[0] * out[1] * len(out)


@case(*V)
def list_setitem_in_branch(x):
    out = [x, x]
    alias = out
    if x > 0:
        out[1] = x * 2
    return alias[0] * alias[1]


@case(*V, gradient=False)
def list_setitem_in_while(x):
    out = [x, x]
    i = paddle.to_tensor(0)
    while i < 3:
        out[1] = out[1] + out[0]
        i += 1
    return out[0] * out[1]


@case(*V3, gradient=False)
def tensor_setitem_in_while(x):
    out = paddle.zeros([3])
    i = paddle.to_tensor(0)
    while i < 3:
        out[i] = x[i] * 2
        i += 1
    return out


@case(*V3)
def tensor_setitem_in_branch(x):
    out = x * 1
    for i in range(3):
        if x[i] > 0:
            out[i] = x[i] * 2
    return out.sum()


@case(*V)
def augassign_list(x):
    out = [x]
    if x > 0:
        out += [x * 2]
    else:
        out += [x * 3]
    return out[0] * out[1]


@case(*V)
def dict_update(x):
    d = {"a": x}
    if x > 0:
        d.update(b=x * 2)
    else:
        d["b"] = x
    return d["a"] * d["b"]


@case(*V)
def both_branches_define(x):
    if x > 0:
        y = x * 2
        z = {"a": x, "b": [x, x + 1]}
    else:
        y = x * 3
        z = {"a": -x, "b": [x * x, x]}
    return y + z["a"] * z["b"][0] + z["b"][1]


@case(*V)
def none_carried(x):
    best = None
    for k in (1.0, 2.0):
        if best is None:
            best = x * k
        else:
            if x * k > best:
                best = x * k
    return best


@case(*V)
def tuple_unpack(x):
    a, (b, c) = x, (x * 2, x * 3)
    if x > 0:
        a, b = b, a
    else:
        (a, c), b = (c, a), b
    return a * 2 + b * 3 + c


@case(*V3)
def len_enum_zip(x):
    s = x[0] * 0
    for i, r in enumerate(x):
        if r > i:
            s = s + r * i
    for a, b in zip(x, x * 2):
        if a > 0:
            s = s + a * b
        else:
            s = s - b
    for i in range(len(x)):
        if x[i] > 0:
            s = s + x[i]
    return s * len(x)


@case(*N, gradient=False)
def enumerate_range_tensor(n):
    s = n * 0
    for i, k in enumerate(range(n)):
        s = s + i * k
    return s


@case(*V, gradient=False)
def min_max_abs(x):
    return max(x, x * 2), min(x, 1.0), abs(x)


@case(*V, gradient=False)
def sorted_any_all(x):
    return any([x > 0, x < -1]), all([x > 0, x > 1])


@case(*V, gradient=False)
def shape_cond(x):
    if x.ndim == 0 and x.shape == []:
        if x > 0:
            return x
        return x + 1
    return x * 2


@case(*V)
def del_(x):
    y = x * 2
    tmp = y + 1
    del y
    if tmp > 0:
        tmp = tmp * 2
        extra = tmp
        del extra
    d = {"a": x, "b": x}
    del d["b"]
    return tmp + d["a"] + len(d)


@case(*V)
def walrus(x):
    if (y := x * 2) > 1:
        y = y * 3
    z = (w := y + 1) * 2
    return y + z + w


@case(*V, gradient=False)
def walrus_while(x):
    n = 0
    while (x := x * 2 + 6) < 20:
        n += 1
    return x, n


@case(*V3)
def walrus_comprehension(x):
    s = [last := r * 2 for r in x]
    return s[0] + last


@case(*V)
def fstring(x):
    k = 3
    name = f"a{k}"
    d = {"a3": x}
    if x > 0:
        y = d[f"a{k}"] * 2
    else:
        y = d[name]
    return y


@case(*V, gradient=False)
def counts_in_objects(x):
    steps, totals, seen = [0], {"n": 0}, Tally()
    while x < 10:
        steps[0] += 1
        totals["n"] += 2
        seen.add(x)
        x = x * 2 + 4
    return steps, totals, seen.total, seen.calls


class Tally:
    def __init__(self):
        self.total = 0.0
        self.calls = 0

    def add(self, x):
        self.total = self.total + x
        self.calls += 1


@case(*V, gradient=False)
def objects_made_in_a_loop(x):
    total = x * 0
    i = paddle.to_tensor(0)
    while i < 3:
        pair = []
        pair.append(x * i)
        pair.append(x)
        one = Tally()
        one.add(x)
        sizes = x.shape + [1]
        sizes.append(3)
        total = total + pair[0] + pair[1] + one.total + len(sizes)
        i += 1
    return total


@case(*V)
def alias_sees_what_a_branch_wrote(x):
    rows = [x, [x]]
    same = rows
    if x > 0:
        rows[0] = x * 2
        rows[1].append(x * 3)
    else:
        rows[1].insert(0, x * 4)
    return same[0] * same[1][0] + same[1][1] * len(rows[1])


@case(*V)
def sets_and_deques(x):
    seen, queue = {1}, collections.deque([x, x + 1])
    if x > 0:
        seen.add(2)
        queue.append(queue.popleft())
    else:
        seen |= {2}
        queue.rotate(0)
    return queue[0] * len(seen)


class Private:
    __rate = 2.0

    def __init__(self):
        self.__total = 1.0

    def run(self, x):
        if x > 0:
            self.__total = self.__total + x

        def scaled(y):
            return y * self.__rate

        return scaled(self.__total) * x


@case(*V)
def private_names(x):
    return Private().run(x)


@case(*N, gradient=False)
def reversed_ranges(n):
    total = n * 0
    for i in reversed(range(1, n, 2)):
        total = total * 10 + i
    for k, i in enumerate(range(n, 9, 3), 5):
        total = total * 3 + k * i
    return total


@case(*V)
def largest_of_several(x):
    return max(x, 1.0) + min([x, x * x, 0.25 * x]) * (2.0 if any([x > 0, x < -1]) else 1.0)


class Shared:
    total = 0

    def hit(self, x):
        type(self).total += 1
        return x


@case(*V)
def class_attribute(x):
    Shared.total = 0
    one = Shared()
    if x > 0:
        one.hit(x)
        one.hit(x)
    return x + Shared.total


@case(*V)
def inner_list_of_a_copy(x):
    inner = [x]
    rows = [inner]
    if x > 0:
        for row in list(rows):
            row[0] = row[0] * 2
        same = tuple(rows)
        same[0][0] = same[0][0] + 1
    return inner[0] * x


@case(*V, gradient=False)
def queue_in_a_loop(x):
    queue = [x, x + 1, x + 2]
    i = paddle.to_tensor(0)
    while i < 4:
        queue.append(queue.pop(0) * 2)
        i += 1
    return queue


@case(*V, gradient=False)
def table_of_lists_in_nested_loops(x):
    table = [[x, x], [x, x]]
    i = paddle.to_tensor(0)
    while i < 3:
        for a in range(2):
            for b in range(2):
                if x > 0:
                    table[a][b] = table[a][b] + a + b
                else:
                    table[a][b] = table[a][b] - a
        i += 1
    return table
