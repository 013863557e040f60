"""The workload of a training step: the parameters, their use, and the batch; of a whole model or of one pipeline
stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polyreme.mesh import Plan

Use = Literal["product", "bias", "head", "gain", "shift", "lookup", "positions", "expert"]


@dataclass(frozen=True)
class ParameterShape:
    """One trained parameter: logical dims, whole shape, bytes of an element of it and of its gradient.

    uses: how it is used, once for each place: in a "product" with the tokens, as a "bias" of one, as the "head", whose
    gradient is made in the forward, as a "gain" or "shift" of each token, as a "lookup" by token or as a table of
    "positions", or as an "expert" of the tokens that chose it. The backward reads the values of a product's
    weight and of a gain only.
    is_home: False on a pipeline stage that uses a copy of another stage's parameter.
    """

    name: str
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    itemsize: int = 4
    grad_itemsize: int = 4
    uses: tuple[Use, ...] = ("product",)
    is_home: bool = True


@dataclass(frozen=True)
class Workload:
    """A transformer and the batch one step trains it on.

    batch: rows of the whole step. key_width, query_width: widths of all key heads and of all query heads together, the
    mean of keys' and values'; of the latter hidden if 0. itemsize: bytes of an activation's element. norms: how often
    the global norm of the gradients is taken. stage: the pipeline stage this is the work of; None for a whole model.
    sharers: on the stage where they are at home, names of parameters that another stage copies. put_off: layers on the
    stage whose weights get their gradients in a program of their own. sent_itemsize: bytes of an element of what goes
    from stage to stage, itemsize if None. experts: of each layer's feed-forward, of which experts_per_token work on a
    token; 0 for none. tokens_per_expert: of a sequence, where experts choose as many, else 0. heads, kv_heads: of all
    devices; with 0 any number of devices divides them. is_order_free: whether the
    model keeps its tokens in a plan's zigzag order by itself; else attention sends them there and back.
    """

    parameters: tuple[ParameterShape, ...]
    batch: int
    seq: int
    hidden: int
    num_layers: int
    key_width: float
    itemsize: int = 4
    norms: int = 1
    stage: int | None = None
    sharers: tuple[str, ...] = ()
    put_off: int = 0
    sent_itemsize: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    tokens_per_expert: int = 0
    query_width: float = 0
    heads: int = 0
    kv_heads: int = 0
    is_order_free: bool = True


def workload_of(model: Any, batch: int, seq: int, *, itemsize: int = 4, norms: int = 1) -> Workload:
    """The Workload of a decoder (models/parts/decoder.py) with its parameters as they are.

    norms: how often a step takes the global norm of the gradients.
    """
    config = model.config
    heads = config.num_heads
    head_dim = getattr(config, "head_dim", config.hidden_size // heads)
    # queries and results are sent together, and so are keys and values: where values are narrower, by their mean
    head_dim = (head_dim + getattr(config, "v_head_dim", head_dim)) / 2
    kv_heads = getattr(config, "num_kv_heads", heads)
    named = dict(model.named_parameters())
    shapes = []
    for name, p in named.items():
        if p.stop_gradient:
            continue
        width = p._array.dtype.itemsize
        shapes.append(ParameterShape(name, tuple(p.dims), tuple(p.shape), width, width, _uses(name, named, config)))
    return Workload(
        parameters=tuple(shapes),
        batch=batch,
        seq=seq,
        hidden=config.hidden_size,
        num_layers=config.num_layers,
        key_width=kv_heads * head_dim,
        query_width=heads * head_dim,
        itemsize=itemsize,
        norms=norms,
        experts=getattr(config, "num_experts", 0),
        experts_per_token=getattr(config, "experts_per_token", 0),
        tokens_per_expert=getattr(config, "tokens_per_expert", 0),
        heads=heads,
        kv_heads=kv_heads,
        is_order_free=getattr(model, "is_order_free", True),
    )


@dataclass(frozen=True)
class BlockMaps:
    """The linear maps of half a block, attention or feed-forward, that mp splits.

    columns: those that read the half's input, of which each device makes a part of what comes out; rows: those that
    give the half's output, a sum over devices. experts: whether there are some, which do both as one map. latents:
    widths of the latents of attention (DeepSeek's), each whole on every device and read by a map of columns of its own,
    or by all heads.
    """

    columns: int = 0
    rows: int = 0
    experts: bool = False
    latents: tuple[int, ...] = ()


_SPLIT = ("heads", "kv_heads", "ffn")


def block_maps(parameters: Sequence[ParameterShape]) -> list[BlockMaps]:
    """The halves of all blocks whose parameters these are.

    >>> names = {"up": ("embed", "ffn"), "gate": ("embed", "ffn"), "down": ("ffn", "embed")}
    >>> block_maps([ParameterShape(f"blocks.0.ffn.{name}.weight", dims, (8, 8)) for name, dims in names.items()])
    [BlockMaps(columns=2, rows=1, experts=False, latents=())]
    """
    halves: dict[str, list[ParameterShape]] = {}
    for p in parameters:
        steps = p.name.split(".")
        half = next((at for at, step in enumerate(steps) if step in ("attention", "ffn")), None)
        if half is not None and p.is_home:
            halves.setdefault(".".join(steps[: half + 1]), []).append(p)
    return [_maps(half) for half in halves.values()]


def _maps(half: Sequence[ParameterShape]) -> BlockMaps:
    matrices = [p for p in half if len(p.dims) == 2]
    columns = sum(p.dims[0] == "embed" and p.dims[1] in _SPLIT for p in matrices)
    rows = sum(p.dims[0] in _SPLIT and p.dims[1] == "embed" for p in matrices)
    latents = [p.shape[0] for p in matrices if p.dims == ("latent", "heads")]
    # what is left of the latents is the part of keys that all heads share
    shared = sum(p.shape[1] for p in matrices if p.dims == ("embed", "latent")) - sum(latents)
    experts = any("expert" in p.uses for p in half)
    return BlockMaps(columns, rows, experts, (*latents, *([shared] if shared > 0 else [])))


def _uses(name: str, named: dict, config: Any) -> tuple[Use, ...]:
    p = named[name]
    if "expert" in p.dims:
        return ("expert",)
    if p.dims[0] == "vocab":
        return ("lookup", "head") if config.tie_embeddings else ("lookup",)
    if p.dims[-1] == "vocab":
        return ("head",)
    if p.dims == ("embed", None):
        # a router's product leaves batch and sequence apart, as gains do
        return ("gain",)
    if len(p.dims) == 2 and p.dims[0] is None:
        return ("positions",)
    if name.endswith(".bias"):
        weight = named[name.removesuffix("bias") + "weight"]
        return ("bias",) if len(weight.shape) == 2 else ("shift",)
    return ("product",) if len(p.shape) == 2 else ("gain",)


def stage_workloads(work: Workload, plan: Plan, homes: Mapping[str, int]) -> list[Workload]:
    """The part of each pipeline stage. homes: the chunk that each parameter is at home in, by name.

    A block counts where its parameters are. The last chunk uses the output head, be it at home there or not.
    """
    return [_of_stage(work, stage, plan, homes) for stage in range(plan.mesh.pp)]


def _of_stage(work: Workload, stage: int, plan: Plan, homes: Mapping[str, int]) -> Workload:
    last = plan.stage_of_chunk[-1]
    here: list[ParameterShape] = []
    sharers = []
    for p in work.parameters:
        is_home = plan.stage_of_chunk[homes[p.name]] == stage
        uses = tuple(use for use in p.uses if (stage == last if use == "head" else is_home))
        if uses or is_home:
            here.append(dataclasses.replace(p, uses=uses, is_home=is_home))
        if is_home and len(uses) < len(p.uses):
            sharers.append(p.name)
    chunks = {p.name.split(".")[1]: homes[p.name] for p in here if p.name.startswith("blocks.")}
    # nothing waits for the gradients of the first chunk's inputs: all of its backward is put off, none is done twice
    put_off = sum(chunk > 0 for chunk in chunks.values()) if plan.schedule_kind.split_backward else 0
    return dataclasses.replace(
        work,
        parameters=tuple(here),
        num_layers=len(chunks),
        stage=stage,
        sharers=tuple(sharers),
        put_off=put_off,
    )
