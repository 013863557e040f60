"""global_scatter and global_gather in one process; tests/distributed/test_processes.py has two."""

import pytest

import polyreme as paddle
from polyreme.distributed.communication import axis_group
from polyreme.distributed.utils import global_gather, global_scatter
from polyreme.errors import ConfigError, DTypeError, ShapeError


def test_one_process_has_all_experts():
    counts = paddle.to_tensor([2, 0, 1])
    for move in (global_scatter, global_gather):
        x = paddle.to_tensor([[1.0, 2], [3, 4], [5, 6]], stop_gradient=False)
        out = move(x, counts, counts)
        assert out.tolist() == x.tolist()
        (out * out).sum().backward()
        assert x.grad.tolist() == [[2, 4], [6, 8], [10, 12]]


def test_counts_that_do_not_fit_are_refused():
    x, counts = paddle.ones([3, 2]), paddle.to_tensor([2, 0, 1])
    with pytest.raises(ShapeError, match=r"x \[2, 2\], but local_count=\[2, 0, 1\] adds up to 3"):
        global_scatter(x[:2], counts, counts)
    with pytest.raises(ShapeError, match=r"global_gather: x \[3, 2\], but global_count=\[2, 0, 2\] adds up to 4"):
        global_gather(x, counts, paddle.to_tensor([2, 0, 2]))
    with pytest.raises(ShapeError, match=r"local_count \[3\] and global_count \[2\] for 1 processes"):
        global_scatter(x, counts, counts[:2])
    with pytest.raises(DTypeError, match="local_count of float32; counts are integers, cast them to int64"):
        global_scatter(x, counts.astype("float32"), counts)
    group = axis_group(paddle.distributed.ProcessMesh(list(range(8)), ["ep"]).jax_mesh, "ep")
    with pytest.raises(ConfigError, match="global_scatter: a group of mesh axes; needs one of processes"):
        global_scatter(x, counts, counts, group)
