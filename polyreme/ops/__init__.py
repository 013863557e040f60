"""The op tables. Importing this package declares every op."""

from polyreme.core.op import OPS
from polyreme.ops import (
    activation,
    arithmetic,
    attributes,
    complex,
    creation,
    fft,
    float8,
    layout,
    manipulation,
    math,
    messages,
    moments,
    neural,
    normalization,
    probability,
    quantile,
    quantization,
    random,
    recurrent,
    reduce,
    repetition,
    resample,
    ring_linear,
    sampling,
    scan,
    search,
    signal,
    slicing,
    sparse,
    special,
    statistics,
    unique,
    viterbi,
)
from polyreme.ops.attention import caches, columns, dense, gated, packed
from polyreme.ops.attention import sparse as sparse_attention
from polyreme.ops.detection import boxes, proposals, regions, yolo
from polyreme.ops.experts import counts, mixture, routing
from polyreme.ops.indices import gather, scatter, subscripts
from polyreme.ops.losses import alignment, classes, cross_entropy, elementwise
from polyreme.ops.matrices import factors, linalg, norms, products
from polyreme.ops.sequences import labels, within
from polyreme.ops.sequences import layout as sequence_layout
from polyreme.ops.sequences import recurrent as sequence_recurrent
from polyreme.ops.windows import convolution, deformable, fractional_pooling, pooling
