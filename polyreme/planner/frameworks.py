"""What frameworks' programs do apart from a plan: what they keep for the backward, which kernels they have, what runs
beside what. Inputs of a prediction: nothing here is assumed of a framework that is not in the table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from polyreme.errors import ConfigError, did_you_mean

Fusion = Literal["all", "layers", "none"]


@dataclass(frozen=True, slots=True)
class MemoryHabits:
    """What a step's programs keep, where frameworks differ.

    stream: bytes of an element of the residual stream, which norms read. logits: bytes that the loss keeps of each
    logit when all of them are there at once; 0 where it makes them a chunk at a time, its gradient with them. shapes:
    whether attention's output is kept by heads and joined, and a gate's activation beside its product. norms: bytes of
    an element that a norm keeps beside its input, where its elementary kernels each keep theirs. rows: what experts'
    rows lie in: "room" for the most that can come (static shapes), or "exact".
    """

    stream: int = 4
    logits: float = 0.0
    shapes: bool = True
    norms: int = 0
    rows: Literal["room", "exact"] = "room"


POLYREME = MemoryHabits()
"""Of this package's programs, which memory.py is held to."""

_FUSED = MemoryHabits(stream=2, logits=8.0, shapes=False, norms=0, rows="exact")
"""Of programs whose norms have kernels of their own, in 16 bits, with a loss of all logits at once."""

_SYNC = 5e-4
"""Seconds of one dispatch or combine of rows whose number the host waits for and then launches kernels for; set on one
row, Mixtral-8x7B by NeMo 25.04 (0.12 s of a step of 64 layers and microbatches)."""


IDLE_OF_DEEPSPEED = 0.25
"""Seconds that devices wait under DeepSpeed's engine, which is Python between kernels (hooks of every gradient that
copy it into a bucket, masks of overflow, an interpreter of pipeline instructions), over those that they compute: the
median of ten tables of as many authors, of GPT-NeoX, Megatron-DeepSpeed and Hugging Face on V100, A100, A800 and H100.
Each table, predicted with the median of the others, comes from 22% to 11% on the median
(benchmarks/results/planner_published_2026-11-27b.md)."""

_EACH_EXPERT = 1.2e-5
"""Seconds of a call of Transformer Engine's for one expert. Set on the rows of odd number of Qwen3-30B-A3B in
benchmarks/published_more.csv and published_blind.csv; other models' follow. Kernels for all experts came in 2026-07
(Megatron-Bridge 0.5.1)."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework by the words that name it.

    words: in a row's system or notes, lower case. fusion, prunes, gradients: as in Training; gradients are those of
    training in bfloat16. flash: generation of its fused attention on a kind that has kernels of its own, from
    `own_from` (a year with its part) on 3, before 2; so are its products tuned, if that is its habit. beside: mesh axes
    whose collectives run beside arithmetic without being said to: of data-parallel ones from 2023 on, of "mp" from
    `own_from` on. sync, each_expert, narrow, casts, adapted: as in Training. source: where that is from.
    """

    name: str
    words: tuple[str, ...]
    fusion: Fusion
    prunes: bool
    gradients: int
    memory: MemoryHabits
    own_from: float = 9999.0
    sync: float = _SYNC
    each_expert: float = 0.0
    narrow: bool = False
    casts: Literal["apart", "fused"] = "apart"
    adapted: Literal["attention", "all"] = "attention"
    tuned: bool = False
    beside: tuple[str, ...] = ("dp", "sharding")
    from_stage: int = 0
    fused: float = 2023.0
    source: str = ""


FRAMEWORKS = (
    Framework(
        "polyreme",
        ("polyreme",),
        fusion="all",
        prunes=True,
        gradients=4,
        memory=POLYREME,
        sync=0.0,
        source="this package: memory is held to its programs",
    ),
    Framework(
        "automodel",
        ("automodel",),
        fusion="layers",
        prunes=False,
        gradients=2,
        narrow=True,
        memory=_FUSED,
        own_from=2024.4,
        casts="fused",
        source="NeMo AutoModel, examples/benchmark/configs: torch.optim.Adam of bfloat16 weights; FSDP2, cuDNN",
    ),
    Framework(
        "nemo",
        ("nemo", "megatron-bridge"),
        fusion="layers",
        prunes=False,
        gradients=2,  # grad_reduce_in_fp32 is off in its performance recipes
        memory=_FUSED,
        own_from=2024.4,
        each_expert=_EACH_EXPERT,
        casts="fused",  # Transformer Engine's norms and SwiGLU give what is cast
        tuned=True,
        beside=("dp", "sharding", "mp"),  # overlap_grad_reduce, overlap_param_gather, tp_comm_overlap
        source="NeMo performance recipes: bf16 gradients, cuDNN attention, vboost; Transformer Engine kernels",
    ),
    Framework(
        "paddlefleetx",
        ("fleetx",),
        fusion="layers",
        prunes=False,
        gradients=2,
        memory=_FUSED,
        beside=(),
        source="PaddleFleetX: fused kernels of PaddlePaddle 2.4 under float16 O2",
    ),
    Framework(
        "megatron",
        ("megatron", "transformer engine", "megascale"),
        fusion="layers",
        prunes=False,
        gradients=4,
        memory=_FUSED,
        own_from=2024.4,
        each_expert=_EACH_EXPERT,
        casts="fused",  # Transformer Engine's norms and SwiGLU give what is cast
        beside=(),  # --overlap-grad-reduce and --overlap-param-gather are options of Megatron-LM
        source="arXiv:2205.05198, section 4: 34 bytes of a layer's token and width, logits in float32",
    ),
    Framework(
        "xla",
        ("maxtext", "xla", "jax", "levanter", "tensorflow", "paxml", "t5x", "palm"),
        fusion="all",
        prunes=True,
        gradients=2,
        memory=replace(_FUSED, logits=4.0),
        sync=0.0,
        fused=2024.0,  # jax has splash attention since 2023-11, cuDNN's since 2024
        source="MaxText: bfloat16 activations, megablox for dropless experts",
    ),
    Framework(
        "compiled torch",
        ("torch.compile", "inductor", "compile"),
        fusion="layers",
        prunes=False,
        gradients=4,
        memory=_FUSED,
        source="arXiv:2410.06511: FSDP2, torch.compile of each block, float32 reductions, FlashAttention-2 by SDPA",
    ),
    Framework(
        "torch with kernels",
        ("liger", "fused norm", "apex", "fused rmsnorm", "fused layernorm", "llama 3", "hai-llm", "deepep"),
        fusion="layers",
        prunes=False,
        gradients=4,
        memory=_FUSED,
        source="kernels for norms and rotations, the loss by PyTorch",
    ),
    Framework(
        "paddle",
        ("paddle",),
        fusion="none",
        prunes=False,
        gradients=2,
        memory=replace(_FUSED, logits=10.0, norms=4),
        adapted="all",
        beside=(),
        source="PaddleNLP: norms and rotations of elementary kernels",
    ),
    Framework(
        "hugging face",
        ("hugging", "transformers", "accelerate"),
        fusion="none",
        prunes=False,
        gradients=2,
        # logits in 16 bits and widened, their shifted copy, its logarithms, and the gradient of those
        memory=replace(_FUSED, norms=4, logits=18.0),
        from_stage=3,
        source="transformers' models in eager mode, by Trainer under DeepSpeed or FSDP; loss in float32 over all rows",
    ),
    Framework(
        "deepspeed",
        ("deepspeed",),
        fusion="none",
        prunes=False,
        gradients=2,  # grad_accum_dtype is that of the model unless said
        memory=replace(_FUSED, norms=4),
        from_stage=3,  # overlap_comm is off below unless set
        source="PyTorch in eager mode under ZeRO; DeepSpeed, configuration of zero_optimization",
    ),
    Framework(
        "torch",
        ("torch", "fsdp", "llm-foundry", "mosaic", "colossal"),
        fusion="none",
        prunes=False,
        gradients=4,
        memory=replace(_FUSED, norms=4),
        source="PyTorch in eager mode: each elementary operation keeps what its backward reads",
    ),
)
"""The first whose words a description has is taken."""


def framework(name: str) -> Framework:
    """A framework of the table by its name. Raises ConfigError for another, with the nearest.

    >>> framework("megatron").memory.stream
    2
    """
    for each in FRAMEWORKS:
        if each.name == name:
            return each
    names = [each.name for each in FRAMEWORKS]
    raise ConfigError(f"unknown framework {name!r}{did_you_mean(name, names)}")
