"""Gates of a mixture of experts: the experts of each token, and the loss that balances them.

Their maths is PaddlePaddle's: NaiveGate and GShardGate weigh experts by raw logits, and a capacity is a part of the
tokens, not of an expert's share of them. Two things follow from Tensors being global: a loss counts all experts, so it
is the same on every mesh, and what exceeds a capacity is dropped in the order of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyreme.distributed.models.moe.counting import limit_by_capacity
from polyreme.errors import ConfigError
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.layers.linear import Linear
from polyreme.ops.arithmetic import cast
from polyreme.ops.experts.counts import random_routing
from polyreme.ops.random import rand


class BaseGate(Layer):
    """Base of gates: the number of experts, tot_expert = num_expert * world_size, and the last batch's loss."""

    world_size: int
    num_expert: int
    tot_expert: int

    def __init__(self, num_expert: int, world_size: int) -> None:
        super().__init__()
        self.world_size, self.num_expert = world_size, num_expert
        self.tot_expert = world_size * num_expert
        self.loss: Any = None

    def forward(self, x: Any) -> Any:
        """The gate's choice for tokens x; each gate defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(x) -> (values, experts)")

    def set_loss(self, loss: Any) -> None:
        """Keep a loss for get_loss."""
        object.__setattr__(self, "loss", loss)

    def get_loss(self, clear: bool = True) -> Any:
        """The last loss that was set, None if there is none; clear: forget it."""
        loss = self.loss
        if clear:
            self.set_loss(None)
        return loss


class NaiveGate(BaseGate):
    """The topk experts with the greatest logits: tokens [t, d_model] -> (logits [t, topk], experts [t, topk] int64).

    With return_all_scores all logits [t, experts] come third.

    >>> import polyreme as pr
    >>> [part.shape for part in NaiveGate(8, num_expert=4, world_size=1)(pr.ones([3, 8]))]
    [paddle.Size([3, 2]), paddle.Size([3, 2])]
    """

    gate: Linear

    def __init__(self, d_model: int, num_expert: int, world_size: int, topk: int = 2) -> None:
        super().__init__(num_expert, world_size)
        self.gate = Linear(d_model, self.tot_expert)
        for parameter in self.gate.parameters():
            parameter.name = f"gate_{parameter.name}"
        self.top_k = topk

    def forward(self, inp: Any, return_all_scores: bool = False) -> Any:
        logits = self.gate(inp)
        experts, values = best_experts(logits, self.top_k)
        return (values, experts, logits) if return_all_scores else (values, experts)


class GShardGate(NaiveGate):
    """The two best experts by logits, with a capacity of ceil(rate * tokens) for each expert: as NaiveGate.

    capacity: rates in training and in evaluation. random_routing leaves a second expert out if twice its logit is below
    a random number in [0, 1), in evaluation too. loss: tot_expert^2 * mean(choices of an expert / tokens * its mean
    softmax). Experts that are left out are -1. Raises ConfigError for a topk other than 2. Source: arXiv:2006.16668.
    """

    capacity: tuple[float, ...]
    random_routing: bool
    group: Any

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: Sequence[float] = (1.2, 2.4),
        random_routing: bool = True,
        group: Any = None,
    ) -> None:
        check_top_k("GShardGate", topk, 2)
        super().__init__(d_model, num_expert, world_size)
        self.capacity, self.random_routing, self.group = tuple(capacity), random_routing, group

    def forward(self, x: Any) -> Any:
        values, experts, logits = super().forward(x, return_all_scores=True)
        part = cast(F.expert_load(experts, self.tot_expert), "float32") / x.shape[0]
        share = F.softmax(logits, axis=1).mean(0)
        self.set_loss((part * share).mean() * self.tot_expert**2)
        experts = limited(self, experts, x.shape[0])
        if self.random_routing:
            experts = random_routing(experts, values, rand([x.shape[0]], "float32"))
        return values, experts


class SwitchGate(NaiveGate):
    """The best expert by softmax, with GShardGate's capacity: tokens [t, d_model] -> (shares, experts), both [t, 1].

    In training a random number in [1 - switch_eps, 1 + switch_eps) is added to each logit. loss: tot_expert * sum(part
    of the tokens that an expert got * its share of all, by the number of tokens that are not dropped). Raises
    ConfigError for a topk other than 1. Source: arXiv:2101.03961.
    """

    switch_eps: float
    capacity: tuple[float, ...]
    group: Any

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: Sequence[float] = (1.2, 2.4),
        group: Any = None,
    ) -> None:
        check_top_k("SwitchGate", topk, 1)
        super().__init__(d_model, num_expert, world_size, topk=1)
        self.switch_eps, self.capacity, self.group = switch_eps, tuple(capacity), group

    def forward(self, inp: Any) -> Any:
        logits = self.gate(inp)
        if self.training:
            logits = logits + (rand(logits.shape) * 2 * self.switch_eps + 1.0 - self.switch_eps)
        share = F.softmax(logits, axis=-1)
        experts, values = best_experts(share, 1)
        experts = limited(self, experts, inp.shape[0])
        load = cast(F.expert_load(experts, self.tot_expert), "float32")
        tokens = load.sum()
        self.set_loss((load / tokens * (share.sum(0) / tokens)).sum() * self.tot_expert)
        return values, experts


def best_experts(scores: Any, top_k: int) -> tuple[Any, Any]:
    """(experts int64, scores) of the top_k greatest."""
    choices, values, _ = F.choose_experts(scores, top_k=top_k, score="logits", normalize=False)
    return cast(choices, "int64"), values


def limited(gate: Any, experts: Any, tokens: int) -> Any:
    """The gate's choices within its capacity of a batch of so many tokens."""
    rate = gate.capacity[0 if gate.training else 1]
    return limit_by_capacity(experts, gate.tot_expert, 1, math.ceil(rate * tokens))[2]


def check_top_k(what: str, top_k: int, needs: int) -> None:
    """Raise ConfigError for another number of experts than the gate chooses."""
    if top_k != needs:
        raise ConfigError(f"{what}: topk={top_k}; it chooses {needs}, give topk={needs} or another gate")
