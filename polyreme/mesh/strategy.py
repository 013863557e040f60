"""Parallel strategies as values: which mesh axes split which logical dims of which tensors.

Layers name the logical dims of their tensors, a Strategy maps them to axes, and nothing else decides.

The vocabulary of logical dims:

    parameters   embed (the model's width)  heads  kv_heads  head_dim  ffn  inner  vocab  expert  expert_ffn (the
                 width inside an expert)  layers (of a stack)
    activations  batch  seq (of the residual stream)  block_seq (inside attention and MLP,
                 where `mp` splits heads and ffn)  embed  heads  kv_heads  head_dim  ffn  inner  vocab  expert
                 msa_rows  msa_cols  pair_rows  pair_cols (of which a tensor names one at a time)  bp (branches)

inner is what lies between a column-parallel and a row-parallel layer whose use is not known: heads or ffn.

Other names are allowed: a dim that a strategy does not map is replicated. A spec is a plain tuple, one entry per dim:
None (not split), an axis, or a tuple of axes, outermost first; it has the meaning of jax.sharding.PartitionSpec(*spec).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from polyreme.errors import ConfigError, PlacementError, ShapeError, did_you_mean
from polyreme.mesh.axes import MeshShape, check_axis, nearest_divisor, nearest_multiples

Axes = tuple[str, ...]
Entry = str | Axes | None
Spec = tuple[Entry, ...]
Dim = str | None

ANY = "*"
"""The logical dim that means "whichever dim of the tensor divides": how parameter sharding reaches every tensor."""

BRANCHES = "bp"
"""The logical dim of what several branches compute: its mesh axis has devices for each of them."""

LAYERS = "layers"
"""The logical dim of a stacked parameter that counts layers: a loop takes one entry of it at a time, so an axis that
may move cuts it last."""

_KINDS = ("param", "act", "grad", "state")


class Rule(Mapping[str, Axes]):
    """An immutable map from logical dim to the mesh axes that split it, outermost first."""

    __slots__ = ("_axes",)

    def __init__(self, axes: Mapping[str, Sequence[str]] | None = None) -> None:
        self._axes = {dim: _check_axes(dim, names) for dim, names in dict(axes or {}).items() if names}

    def __getitem__(self, dim: str) -> Axes:
        return self._axes[dim]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def __hash__(self) -> int:
        return hash(frozenset(self._axes.items()))

    def __repr__(self) -> str:
        return repr(self._axes)

    def __or__(self, other: Rule) -> Rule:
        dims = {**self._axes, **other._axes}
        return Rule({d: tuple(dict.fromkeys(self.get(d, ()) + other.get(d, ()))) for d in dims})


@dataclass(frozen=True, slots=True)
class Strategy:
    """Which mesh axes split which logical dims, for each of the four kinds of tensor.

    param: parameters.  act: activations.  grad: gradients.  state: optimizer state. grad and state are as param when
    not given. Strategies join with `|`: every dim gets the axes of both, left before right.
    Raises PlacementError for an unknown axis, for one named twice on a dim, and for `pp`, which splits layers into
    stages and no tensor.

    >>> (zero(3) | tensor_parallel()).param_spec(("embed", "ffn"))
    ('sharding', 'mp')
    """

    param: Mapping[str, Sequence[str]] | None = None
    act: Mapping[str, Sequence[str]] | None = None
    grad: Mapping[str, Sequence[str]] | None = None
    state: Mapping[str, Sequence[str]] | None = None

    def __post_init__(self) -> None:
        for kind in _KINDS:
            rule = getattr(self, kind)
            if rule is None and kind in ("grad", "state"):
                rule = self.param
            if rule is not None and not isinstance(rule, Mapping):
                raise ConfigError(f"strategy {kind}={rule!r}; give a dict of logical dim -> mesh axes")
            object.__setattr__(self, kind, rule if isinstance(rule, Rule) else Rule(rule))

    def __or__(self, other: Strategy) -> Strategy:
        return Strategy(**{kind: self.rule(kind) | other.rule(kind) for kind in _KINDS})

    def __str__(self) -> str:
        lines = [f"{kind:5} {_rule_text(self.rule(kind))}" for kind in _KINDS]
        return "\n".join(lines)

    @property
    def axes(self) -> frozenset[str]:
        """Every mesh axis that some rule uses."""
        return frozenset(axis for kind in _KINDS for names in self.rule(kind).values() for axis in names)

    def rule(self, kind: str) -> Rule:
        """The map of one kind: "param", "act", "grad" or "state"."""
        return getattr(self, kind)

    def param_spec(
        self, dims: Sequence[Dim], shape: Sequence[int] | None = None, mesh: MeshShape | None = None
    ) -> Spec:
        """Placement of a parameter with these logical dims (None: a dim without a name); -> one entry per dim.

        With shape and mesh, axes of degree 1 are left out and every split is checked to be even.

        An axis listed under ANY in the rule may move: it goes to the first dim that it divides evenly, trying the
        dims the rule names for it, then the dims not split yet, then the dims already split, each from left to right;
        if none divides, the tensor is replicated over that axis. Parameter sharding (`zero`) is such an axis: where it
        cuts does not change the arithmetic. Any other axis must divide the dim it is named for.

        Raises PlacementError for an axis that splits two dims of the tensor and for a dim that does not divide
        (naming dim, size, axis and the nearest sizes and degrees that do), ShapeError if dims and shape differ in
        length, ConfigError for a shape without a mesh.
        """
        return _spec(self.rule("param"), dims, shape, mesh)

    def use_spec(self, dims: Sequence[Dim], shape: Sequence[int] | None = None, mesh: MeshShape | None = None) -> Spec:
        """Placement of a parameter while an op reads it: param_spec, gathered over the axes that may move (ANY).

        Parameter sharding keeps a parameter in pieces between its uses; each use needs the whole of it. Source:
        arXiv:1910.02054, section 5.3.
        """
        rule = self.rule("param")
        movable = rule.get(ANY, ())
        kept = {dim: tuple(a for a in axes if a not in movable) for dim, axes in rule.items() if dim != ANY}
        return _spec(Rule(kept), dims, shape, mesh)

    def act_spec(self, dims: Sequence[Dim], shape: Sequence[int] | None = None, mesh: MeshShape | None = None) -> Spec:
        """Placement of an activation with these logical dims; see param_spec."""
        return _spec(self.rule("act"), dims, shape, mesh)

    def grad_spec(self, dims: Sequence[Dim], shape: Sequence[int] | None = None, mesh: MeshShape | None = None) -> Spec:
        """Placement of the gradient of a parameter with these logical dims; see param_spec."""
        return _spec(self.rule("grad"), dims, shape, mesh)

    def state_spec(
        self, dims: Sequence[Dim], shape: Sequence[int] | None = None, mesh: MeshShape | None = None
    ) -> Spec:
        """Placement of the optimizer state of a parameter with these logical dims; see param_spec."""
        return _spec(self.rule("state"), dims, shape, mesh)

    def to_dict(self) -> dict[str, dict[str, list[str]]]:
        """Plain dicts and lists, all four kinds: what `from_dict` takes."""
        return {kind: {dim: list(axes) for dim, axes in self.rule(kind).items()} for kind in _KINDS}

    @classmethod
    def from_dict(cls, kinds: Mapping[str, Mapping[str, Sequence[str]]]) -> Strategy:
        """A Strategy from plain dicts; raises ConfigError for a kind it does not know."""
        if not isinstance(kinds, Mapping):
            raise ConfigError(f"strategy {kinds!r}; give a dict with any of {', '.join(_KINDS)}")
        for kind in kinds:
            if kind not in _KINDS:
                raise ConfigError(f"unknown key {kind!r} in strategy{did_you_mean(kind, _KINDS)}")
        return cls(**kinds)


def data_parallel() -> Strategy:
    """The batch is split over `dp` and, because parameter sharding is data parallel too, over `sharding`."""
    return Strategy(act={"batch": ("dp", "sharding")})


def zero(stage: int) -> Strategy:
    """Parameter sharding over the `sharding` axis: on the first dim that divides and has no other axis, whose parts
    are contiguous, else on one that has.

    Stage 1 splits the optimizer state, 2 also the gradients, 3 also the parameters. Source: arXiv:1910.02054.
    Raises ConfigError for another stage.
    """
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise ConfigError(
            f"sharding stage {stage!r}; give 1 (optimizer state), 2 (also gradients) or 3 (also parameters)"
        )
    split = {ANY: ("sharding",)}
    return Strategy(param=split if stage == 3 else {}, grad=split if stage >= 2 else {}, state=split)


def tensor_parallel(experts: bool = True) -> Strategy:
    """Attention heads, the MLP's hidden width and the vocabulary are split over `mp`; with experts the width inside
    each expert too. Source: arXiv:1909.08053."""
    dims = ("heads", "kv_heads", "ffn", "inner", "vocab", *(("expert_ffn",) if experts else ()))
    split = {dim: ("mp",) for dim in dims}
    return Strategy(param=split, act=split)


def sequence_parallel() -> Strategy:
    """Adds to tensor_parallel that `mp` splits the residual stream's `seq` between blocks. Source: arXiv:2205.05198."""
    return Strategy(act={"seq": ("mp",)})


def segment_parallel() -> Strategy:
    """The sequence is split over `sep` everywhere, inside blocks too; attention must then exchange keys and values.

    Of an alignment of sequences, and of pairs of residues, it splits rows or columns, whichever a model names at the
    time: dynamic axial parallelism (arXiv:2203.00854).
    """
    axial = ("msa_rows", "msa_cols", "pair_rows", "pair_cols")
    return Strategy(act=dict.fromkeys(("seq", "block_seq", *axial), ("sep",)))


def expert_parallel(axes: Sequence[str] = ("ep",)) -> Strategy:
    """Experts are split over `ep`; outside the experts that axis splits the batch, so that no device repeats work.

    axes: the axes that split experts, outermost first: `ep` and others that split something else outside of them.
    Source of such folding: arXiv:2504.14960.
    """
    batch = {"batch": ("ep",)} if "ep" in axes else {}
    return Strategy(param={"expert": tuple(axes)}, act={"expert": tuple(axes), **batch})


def branch_parallel(axis: str = "mp") -> Strategy:
    """Branches of a computation (`distributed.branches`) each have devices of their own along an axis, which splits
    nothing else: everything else is whole there. Source: arXiv:2211.00235."""
    return Strategy(act={BRANCHES: (axis,)})


def join(*strategies: Strategy) -> Strategy:
    """All of them joined with `|`; the empty Strategy (everything replicated) for none."""
    return reduce(or_, strategies, Strategy())


def _check_axes(dim: object, names: object) -> Axes:
    if not isinstance(dim, str) or not dim:
        raise ConfigError(f"logical dim {dim!r} in a strategy; give a name")
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"dim {dim!r} maps to {names!r}; give a tuple of mesh axes such as ('mp',)")
    axes = tuple(check_axis(name) for name in names)
    if "pp" in axes:
        raise PlacementError(f"dim {dim!r} maps to axis 'pp', which splits layers into stages, not tensors; drop it")
    if len(set(axes)) != len(axes):
        raise PlacementError(f"dim {dim!r} maps to {axes}, which names an axis twice; name it once")
    return axes


def _rule_text(rule: Rule) -> str:
    return "  ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in rule.items()) or "replicated"


class _Splits:
    """The axes put on each dim of one tensor so far."""

    def __init__(self, dims: Sequence[Dim], shape: Sequence[int] | None, mesh: MeshShape | None) -> None:
        if shape is not None and mesh is None:
            raise ConfigError(
                f"a spec for dims {tuple(dims)} got shape {tuple(shape)} but no mesh; give both or neither"
            )
        if shape is not None and len(shape) != len(dims):
            raise ShapeError(
                f"dims {tuple(dims)} name {len(dims)} dims, shape {tuple(shape)} has {len(shape)}; "
                "name each dim, None if it has no name"
            )
        self.dims, self.shape, self.mesh = tuple(dims), shape, mesh
        self.axes: list[list[str]] = [[] for _ in dims]

    def is_live(self, axis: str) -> bool:
        return self.mesh is None or self.mesh.degree(axis) > 1

    def ways(self, at: int) -> int:
        return math.prod(self.mesh.degree(axis) for axis in self.axes[at]) if self.mesh else 1

    def fits(self, at: int, axis: str) -> bool:
        if self.shape is None or self.mesh is None:
            return True
        return self.shape[at] % (self.ways(at) * self.mesh.degree(axis)) == 0

    def put_fixed(self, dim: int, axis: str) -> None:
        for other, taken in zip(self.dims, self.axes, strict=True):
            if axis in taken:
                raise PlacementError(
                    f"mesh axis {axis!r} splits both {other!r} and {self.dims[dim]!r} of dims {self.dims}; "
                    "drop one from the strategy"
                )
        if not self.fits(dim, axis):
            raise PlacementError(self._misfit(dim, axis))
        self.axes[dim].append(axis)

    def put_movable(self, axis: str, named: list[int]) -> None:
        inside = [at for at, dim in enumerate(self.dims) if dim != LAYERS]
        free = [at for at in inside if not self.axes[at]]
        for at in dict.fromkeys([*named, *free, *inside, *range(len(self.dims))]):
            if self.fits(at, axis):
                self.axes[at].append(axis)
                return

    def spec(self) -> Spec:
        return tuple(None if not a else a[0] if len(a) == 1 else tuple(a) for a in self.axes)

    def _misfit(self, dim: int, axis: str) -> str:
        assert self.shape is not None  # fits() is false only where shape and mesh are known
        assert self.mesh is not None
        size, degree, before = self.shape[dim], self.mesh.degree(axis), self.ways(dim)
        over = "+".join([*self.axes[dim], axis])
        fitting = nearest_divisor(size // before, degree) if size % before == 0 and size else 1
        return (
            f"dim {self.dims[dim]!r} of size {size} (dims {self.dims}, shape {tuple(self.shape)}) does not divide into "
            f"{before * degree} equal parts over {over} ({axis} has degree {degree}); "
            f"make it {nearest_multiples(size, before * degree)}, or set {axis} to {fitting}"
        )


def _spec(rule: Rule, dims: Sequence[Dim], shape: Sequence[int] | None, mesh: MeshShape | None) -> Spec:
    splits, movable = _Splits(dims, shape, mesh), rule.get(ANY, ())
    named = [
        (index, axis) for index, dim in enumerate(dims) for axis in rule.get(dim or "", ()) if splits.is_live(axis)
    ]
    # Fixed axes first: a movable axis then shares a dim only as its innermost split, so gathering it is contiguous.
    for index, axis in named:
        if axis not in movable:
            splits.put_fixed(index, axis)
    for axis in filter(splits.is_live, movable):
        splits.put_movable(axis, [index for index, name in named if name == axis])
    return splits.spec()
