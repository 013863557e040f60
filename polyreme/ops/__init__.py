"""The op tables. Importing this package declares every op."""

from polyreme.core.op import OPS
from polyreme.ops import (
    arithmetic,
    complex,
    creation,
    gather_scatter,
    indexing,
    layout,
    linalg,
    manipulation,
    math,
    norms,
    products,
    quantile,
    random,
    reduce,
    scan,
    search,
    special,
    statistics,
)
