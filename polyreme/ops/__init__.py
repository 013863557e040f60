"""The op tables. Importing this package declares every op."""

from polyreme.core.op import OPS
from polyreme.ops import (
    arithmetic,
    attributes,
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
    repetition,
    scan,
    scatter,
    search,
    slicing,
    special,
    statistics,
    unique,
)
