"""Diffusion on a grid with sparse matrices: solved by conjugate gradients, and inverted for what it diffuses through.

    python examples/sparse_poisson.py

-div(k grad u) = f on the unit square, u = 0 on its border. The matrix D^T K D of differences over the grid's edges is
a product of sparse Tensors, so its elements have gradients; the solution has them by the adjoint equation, which costs
one more solution and forms no dense matrix. Part 1 compares with a known solution, part 2 finds the conductivities of
the left and the right half from the temperatures at 50 places.
"""

import numpy as np

import polyreme as paddle
from polyreme import sparse
from polyreme.autograd import PyLayer

SIZE = 24  # unknowns along each side


def differences(size: int) -> sparse.SparseCsrTensor:
    """Differences over all edges of a grid, the first and last of a row reaching the border: [edges, unknowns]."""
    step, node = size + 1, np.arange(size * size)
    row, column = node // size, node % size
    # each node ends one edge and begins another, along its row and along its column
    along = row * step + column
    across = size * step + row * size + column
    edges = np.concatenate([along, along + 1, across, across + size])
    signs = np.repeat([step, -step, step, -step], size * size).astype(float)
    shape = [2 * size * step, size * size]
    return sparse.sparse_coo_tensor([edges, np.tile(node, 4)], signs, shape).to_sparse_csr()


@paddle.jit.to_static
def conjugate_gradients(matrix: sparse.SparseCsrTensor, b: paddle.Tensor) -> paddle.Tensor:
    """The solution of matrix @ x = b, symmetric and positive, to a residual of 1e-10: one compiled loop."""
    x, r = paddle.zeros_like(b), b
    p, rr = r, (r * r).sum()
    enough = 1e-20 * rr
    while rr > enough:
        q = sparse.mv(matrix, p)
        step = rr / (p * q).sum()
        x, r = x + step * p, r - step * q
        p, rr = r + (r * r).sum() / rr * p, (r * r).sum()
    return x


class Solve(PyLayer):
    """matrix @ x = b; with y the solution for x's gradient, b gets y, and element ij of the matrix gets -y_i x_j."""

    @staticmethod
    def forward(ctx, values, b, matrix):
        ctx.matrix = matrix.with_values(values.detach())
        x = conjugate_gradients(ctx.matrix, b.detach())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensor()
        y = conjugate_gradients(ctx.matrix, *gradients)
        return sparse.masked_matmul(-y.unsqueeze(1), x.unsqueeze(0), ctx.matrix).values(), y


def temperature(conductivity: paddle.Tensor, source: paddle.Tensor, d: sparse.SparseCsrTensor) -> paddle.Tensor:
    """u for a conductivity of each edge."""
    weighted = d.to_sparse_coo()
    weighted = weighted.with_values(weighted.values() * conductivity[weighted.indices()[0]]).to_sparse_csr()
    matrix = sparse.matmul(sparse.transpose(d, [1, 0]), weighted)
    return Solve.apply(matrix.values(), source, matrix)


def main(size: int = SIZE) -> tuple[float, list[float]]:
    """Prints, and returns, the error of part 1 and the conductivities of part 2, which are 1 and 3."""
    paddle.set_default_dtype("float64")
    d = differences(size)
    at = np.arange(1, size + 1) / (size + 1)
    x, y = (g.reshape(-1) for g in np.meshgrid(at, at))
    exact = np.sin(np.pi * x) * np.sin(np.pi * y)
    u = temperature(paddle.ones([d.shape[0]]), paddle.to_tensor(2 * np.pi**2 * exact), d)
    error = float((u - paddle.to_tensor(exact)).abs().max())
    print(
        f"{size * size} unknowns, {d.nnz()} differences, error {error:.1e} (of order step^2 = {(size + 1) ** -2:.1e})"
    )

    # an edge belongs to the half its middle lies in
    ends = sparse.abs(d)
    middle = sparse.mv(ends, paddle.to_tensor(x)) / sparse.mv(ends, paddle.ones([size * size]))
    half = (middle > 0.5).astype("int64")
    source = paddle.ones([size * size])
    places = paddle.to_tensor(np.random.default_rng(0).permutation(size * size)[:50])
    measured = temperature(paddle.to_tensor([1.0, 3.0])[half], source, d)[places]
    log_k = paddle.to_tensor([0.5, 0.5], stop_gradient=False)
    adam = paddle.optimizer.Adam(0.1, parameters=[log_k])
    for step in range(60):
        misfit = ((temperature(log_k.exp()[half], source, d)[places] - measured) ** 2).mean() / (measured**2).mean()
        misfit.backward()
        adam.step()
        adam.clear_grad()
        if step % 20 == 0:
            print(f"step {step}: misfit {float(misfit):.1e}, conductivities {log_k.exp().numpy().round(3)}")
    found = log_k.exp().tolist()
    print(f"found {found[0]:.3f} and {found[1]:.3f}, which are 1 and 3")
    paddle.set_default_dtype("float32")
    return error, found


if __name__ == "__main__":
    main()
