"""Time a sparse matrix by a dense one, and the gradients of both, against SciPy, PyTorch and a dense product.

    python benchmarks/sparse.py --python-torch ~/torch/bin/python --save NAME

float32, [4000, 4000] with 16 elements a row on average by [4000, 32]. "taped" is the product, the sum of its squares
and the gradients with respect to the stored elements and the dense matrix; SciPy's are written by hand.
"""

from collections.abc import Callable

import numpy as np
import sides as s

SIDES = ("scipy", "polyreme", "dense", "torch")
CASES = ("csr", "coo", "csr taped", "coo taped")
SIZE, EACH, COLUMNS = 4000, 16, 32


def _data() -> tuple:
    rng = np.random.default_rng(0)
    places = np.unique(rng.integers(0, SIZE * SIZE, SIZE * EACH))
    rows, cols = places // SIZE, places % SIZE
    crows = np.searchsorted(rows, np.arange(SIZE + 1))
    values = rng.standard_normal(len(places)).astype("float32")
    return crows, rows, cols, values, rng.standard_normal((SIZE, COLUMNS)).astype("float32")


def _scipy() -> dict[str, Callable]:
    import scipy.sparse as sp

    crows, rows, cols, values, y = _data()
    matrices = {"csr": sp.csr_matrix((values, cols, crows), (SIZE, SIZE)), "coo": sp.coo_matrix((values, (rows, cols)))}

    def taped(matrix: object) -> float:
        out = matrix @ y  # type: ignore[operator]
        found = (2 * out[rows] * y[cols]).sum(1), matrix.T @ (2 * out)  # type: ignore[attr-defined]
        return found[0][0] + found[1][0, 0]

    return {k: lambda m=m: (m @ y)[0, 0] for k, m in matrices.items()} | {
        f"{k} taped": lambda m=m: taped(m) for k, m in matrices.items()
    }


def _polyreme(dense: bool) -> dict[str, Callable]:
    import polyreme as lib

    crows, rows, cols, values, host = _data()
    y, at = lib.to_tensor(host), lib.to_tensor(np.stack([rows, cols]))
    matrices = {
        "csr": lib.sparse.sparse_csr_tensor(crows, cols, values, [SIZE, SIZE]),
        "coo": lib.sparse.sparse_coo_tensor(at, values, [SIZE, SIZE]),
    }
    whole = matrices["csr"].to_dense()
    product = lib.jit.to_static(lambda m, y: m @ y)

    @lib.jit.to_static
    def gradients(matrix: object, y: object) -> tuple:
        v = matrix.detach() if dense else matrix.values().detach()  # type: ignore[attr-defined]
        y = y.detach()  # type: ignore[attr-defined]
        v.stop_gradient = y.stop_gradient = False
        out = (v if dense else matrix.with_values(v)) @ y  # type: ignore[attr-defined]
        return tuple(lib.grad([(out * out).sum()], [v, y]))

    def taped(matrix: object) -> float:
        found = gradients(matrix, y)
        first = found[0][int(rows[0]), int(cols[0])] if dense else found[0][0]
        return first + found[1][0, 0]

    given = {k: whole if dense else m for k, m in matrices.items()}
    return {k: lambda m=m: product(m, y)[0, 0] for k, m in given.items()} | {
        f"{k} taped": lambda m=m: taped(m) for k, m in given.items()
    }


def _torch() -> dict[str, Callable]:
    import torch as lib

    crows, rows, cols, values, host = _data()
    y, at = lib.from_numpy(host), lib.from_numpy(np.stack([rows, cols]))
    v = lib.from_numpy(values)
    csr = lib.sparse_csr_tensor(lib.from_numpy(crows), lib.from_numpy(cols), v, (SIZE, SIZE))
    coo = lib.sparse_coo_tensor(at, v, (SIZE, SIZE), is_coalesced=True)

    def taped(matrix: object) -> float:
        m, leaf = (t.detach().clone().requires_grad_() for t in (matrix, y))  # type: ignore[attr-defined]
        out = m @ leaf
        (out * out).sum().backward()
        # the gradient of a CSR matrix is dense there
        first = m.grad.coalesce().values()[0] if m.grad.is_sparse else m.grad[rows[0], cols[0]]
        return float(first) + float(leaf.grad[0, 0])

    made = {"csr": csr, "coo": coo}
    return {k: lambda m=m: (m @ y)[0, 0] for k, m in made.items()} | {
        f"{k} taped": lambda m=m: taped(m) for k, m in made.items()
    }


def build(side: str) -> dict[str, Callable]:
    """-> a call of each case; the framework is imported here, in the side's own process."""
    if side == "scipy":
        return _scipy()
    return _torch() if side == "torch" else _polyreme(side == "dense")


def main() -> None:
    """Reads the command line, then measures or works."""
    parser = s.parser(__doc__, SIDES, rounds=15)
    options = s.options_of(parser, SIDES)
    if options.worker:
        s.work(build, options.worker)
        return
    # gradients sum some 16 * 32 products of a few units each
    text, sides = s.table_of_cases(__file__, options, CASES, calls=5, tolerance=1e-3, per=1)
    print(text)
    if options.save:
        what = f"float32, [{SIZE}, {SIZE}] with {EACH} elements a row by [{SIZE}, {COLUMNS}]. {options.rounds} rounds."
        print(s.save(options.save, "Sparse by dense", what, text, sides))


if __name__ == "__main__":
    main()
