"""Writes polyreme/api.py: the root names, one import list for each op table.

Run it after adding an op: `python tools/write_api.py`. tests/test_api.py fails when they are out of date.
"""

import importlib
from pathlib import Path

from polyreme.core.op import OPS
from polyreme.eager.methods import ALIASES, INPLACE

# tables whose names live in nn.functional, or nowhere public
NOT_ROOT_TABLES = set(
    [
        "activation",
        "attention.caches",
        "attention.columns",
        "attention.dense",
        "attention.gated",
        "attention.packed",
        "attention.sparse",
        "detection.boxes",
        "detection.proposals",
        "detection.regions",
        "detection.yolo",
        "experts.counts",
        "experts.mixture",
        "experts.routing",
        "fft",
        "float8",
        "indices.subscripts",
        "layout",
        "losses.alignment",
        "losses.classes",
        "losses.cross_entropy",
        "losses.elementwise",
        "matrices.factors",
        "messages",
        "moments",
        "neural",
        "normalization",
        "probability",
        "quantization",
        "recurrent",
        "resample",
        "ring_linear",
        "sampling",
        "sequences.labels",
        "sequences.layout",
        "sequences.recurrent",
        "sequences.within",
        "signal",
        "sparse",
        "state_space",
        "viterbi",
        "windows.convolution",
        "windows.deformable",
        "windows.fractional_pooling",
        "windows.pooling",
    ]
)
# names of root tables that are public elsewhere only (linalg, nn.functional, Tensor), and parts of public functions
NOT_ROOT = set(
    [
        "cholesky_inverse",
        "cholesky_solve",
        "cond",
        "corrcoef",
        "cov",
        "det",
        "eig",
        "eigh",
        "eigvals",
        "eigvalsh",
        "fill_diagonal",
        "fill_diagonal_",
        "fill_diagonal_tensor",
        "fill_diagonal_tensor_",
        "fp8_fp8_half_gemm_fused",
        "inverse",
        "lstsq",
        "matrix_exp",
        "matrix_norm",
        "matrix_power",
        "matrix_rank",
        "multi_dot",
        "one_hot",
        "pad",
        "pinv",
        "qr",
        "random_",
        "repeat_by",
        "repeat_each",
        "slogdet",
        "solve",
        "svd",
        "svdvals",
        "triangular_solve",
        "uniform_",
        "vector_norm",
        "zeropad2d",
    ]
)
ROOT_TABLES = sorted(
    {f.__module__.removeprefix("polyreme.ops.") for f in OPS.values() if f.__module__.startswith("polyreme.ops.")}
    - NOT_ROOT_TABLES
)

HEAD = '''"""Every name of the root namespace. Written by tools/write_api.py; root.py lists what is not an op.
"""

import difflib
from collections.abc import Callable

from polyreme.eager.methods import INPLACE
'''

TAIL = '''

def nearest(name: str) -> str:
    """"; did you mean ...?" for a name that is close to a public one, else nothing."""
    close = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
'''


def root_names() -> set[str]:
    """Every op and alias that belongs in the root namespace."""
    tables = {n: f.__module__.removeprefix("polyreme.ops.") for n, f in OPS.items()}
    names = {n for n, table in tables.items() if table in ROOT_TABLES and n not in NOT_ROOT}
    for table in ROOT_TABLES:
        aliases = getattr(importlib.import_module(f"polyreme.ops.{table}"), "ALIASES", {})
        names |= {alias for alias, name in aliases.items() if name in names}
    return names | set(_inplace(names))


def _inplace(names: set[str]) -> dict[str, str]:
    """In-place names, those of second names too -> the op's own."""
    own = {n: n for n in INPLACE if n[:-1] in names}
    return own | {f"{a}_": f"{n}_" for a, n in ALIASES.items() if a in names and f"{n}_" in own}


def main() -> str:
    """The text of api.py."""
    lines, names = [HEAD], []
    for table in ROOT_TABLES:
        module = importlib.import_module(f"polyreme.ops.{table}")
        own = sorted(n for n, f in OPS.items() if f.__module__ == module.__name__ and n not in NOT_ROOT)
        lines.append(f"from polyreme.ops.{table} import (\n" + "".join(f"    {n},\n" for n in own) + ")\n")
        names += own
    lines.append("from polyreme import root as _root\nfrom polyreme.root import *\n\n")
    for table in ROOT_TABLES:
        module = importlib.import_module(f"polyreme.ops.{table}")
        for alias, name in sorted(getattr(module, "ALIASES", {}).items()):
            if alias not in names and name in names:
                lines.append(f"{alias} = {name}\n")
                names.append(alias)
    inplace = _inplace(set(names))
    lines.append("\n")
    lines += [f'{n}: Callable[..., _root.Tensor] = INPLACE["{inplace[n]}"]\n' for n in sorted(inplace)]
    names += inplace
    listed = "".join(f'    "{n}",\n' for n in sorted(set(names)))
    lines.append(f"\n__all__ = [\n{listed}]\n__all__ += _root.__all__\n")
    lines.append(TAIL)
    return "".join(lines)


if __name__ == "__main__":
    Path("polyreme/api.py").write_text(main())
