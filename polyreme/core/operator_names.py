"""Names of PaddlePaddle's operators that are not its functions': elementwise_add, reduce_sum, matmul_v2.

They stand in lists of operators, in calls of its kernels and in its messages.
"""

from __future__ import annotations

from collections.abc import Mapping

ELEMENTWISE: Mapping[str, str] = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "max": "maximum", "min": "minimum",
    "pow": "pow", "mod": "mod", "floordiv": "floor_divide",
}  # fmt: skip
"""x of elementwise_x -> the function."""
REDUCTIONS = ("sum", "mean", "max", "min", "prod", "all", "any")
"""x of reduce_x, which are functions of that name."""
_RENAMED = {
    "fill_any_like": "full_like", "top_k": "topk", "arg_max": "argmax", "arg_min": "argmin",
    "hard_sigmoid": "hardsigmoid", "hard_swish": "hardswish", "size": "numel", "lookup_table": "embedding",
    **{f"elementwise_{older}": newer for older, newer in ELEMENTWISE.items()},
    **{f"reduce_{name}": name for name in REDUCTIONS},
}  # fmt: skip


def newer_names(name: str) -> list[str]:
    """Today's possible names of an operator, the likeliest first; a 2 or _v2 at the end marks a second version.

    >>> newer_names("elementwise_div"), newer_names("matmul_v2")
    (['elementwise_div', 'divide'], ['matmul_v2', 'matmul'])
    """
    plain = name.removesuffix("_v2").removesuffix("2")
    names = [name, _RENAMED.get(name), _RENAMED.get(plain), plain]
    return list(dict.fromkeys(n for n in names if n is not None))
