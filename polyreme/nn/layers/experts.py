"""Mixtures of experts: a router, and the feed-forward networks that it chooses from for each token."""

from __future__ import annotations

import functools
import math
import random
from fractions import Fraction
from numbers import Real
from typing import Any, NamedTuple

from polyreme.core import dtype as dtypes
from polyreme.core import state
from polyreme.eager.mode import no_grad
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.kernels.experts import ACTIVATIONS, GATES
from polyreme.nn import functional as F
from polyreme.nn.initializer import XavierUniform
from polyreme.nn.layer import Layer
from polyreme.nn.layers.container import LayerDict
from polyreme.nn.layers.linear import Linear, map_each
from polyreme.nn.layers.quantized import QuantizedExperts
from polyreme.nn.parameter import ParamAttr, ParamAttrLike, Parameter
from polyreme.ops import creation
from polyreme.ops.experts.mixture import check_choice, check_counts, chosen_experts
from polyreme.ops.ids import check_range
from polyreme.ops.layout import constrain

_PRIME = 2**31 - 1

BALANCE_SCOPES = ("micro_batch", "global_batch")
"""Whose choices a Router's balance_loss counts."""


class Routing(NamedTuple):
    """Where tokens go: choices [..., k] int32 with -1 for none, gates [..., k], the router's loss (0-D, float32), and
    load [experts] int32: how many choices fell on each expert before a capacity left some out."""

    choices: Any
    gates: Any
    loss: Any
    load: Any


class Router(Layer):
    """Experts for each token by a linear map of it: [..., d_model] -> Routing.

    top_k: experts of a token. score: what gates are made of: softmax, sigmoid, sqrtsoftplus, relu or the logits.
    normalize, scale: gates are divided by their sum, and multiplied. groups, top_groups: of that many groups of experts
    a token chooses among the top_groups best. selection_bias: a buffer is added to the scores for the choice alone.
    bias_rate: above 0, each optimizer step adds bias_rate * sign(mean load - load of the expert) to it, loads being the
    choices of all microbatches of the step (arXiv:2408.15664); it then has a selection_bias. A router whose weight is
    frozen leaves it alone.
    capacity_factor: an expert takes ceil(factor * tokens * top_k / num_experts) choices of a batch and the rest are
    dropped, by "order" or by "gate"; none is dropped if None. balance_loss, sequence_loss, z_loss: weights of the
    losses that F.balance_loss (over the batch, over each sequence) and F.router_z_loss give, summed in Routing.loss;
    tokens of all devices count together. balance_scope: whose choices balance_loss counts, those of a "micro_batch", or
    of the "global_batch": of all microbatches of the optimizer's step so far, this one included, each of which adds its
    mean shares times the counts at its time (arXiv:2501.11873).

    bias: a learned number is added to each expert's logits. The weight [d_model, num_experts] and all numbers are
    float32, under autocast too. Raises ConfigError for numbers that do not fit each other.

    >>> Router(8, num_experts=4, balance_loss=0.01).weight.shape
    paddle.Size([8, 4])
    """

    num_experts: int
    top_k: int
    bias_rate: float
    balances_step: bool
    keeps_load: bool
    choice: dict[str, Any]
    capacity_factor: float | None
    weight: Parameter
    bias: Parameter | None
    selection_bias: None

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 2,
        *,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        selection_bias: bool = False,
        bias_rate: float = 0.0,
        capacity_factor: float | None = None,
        capacity_by: str = "order",
        balance_loss: float = 0.0,
        balance_scope: str = "micro_batch",
        sequence_loss: float = 0.0,
        z_loss: float = 0.0,
        bias: bool = False,
        weight_attr: ParamAttrLike = None,
    ) -> None:
        super().__init__()
        _check_capacity("Router", capacity_factor)
        if not _is_finite(bias_rate) or bias_rate < 0:
            raise ConfigError(f"Router: {bias_rate=}; give a number above 0, or 0 to leave the bias alone")
        _check_scale("Router", scale)
        check_counts("Router", d_model=d_model)
        check_choice("Router", num_experts, top_k, score, groups, top_groups)
        if capacity_by not in ("order", "gate"):
            raise ConfigError(f"Router: capacity_by={capacity_by!r}; give 'order' or 'gate'")
        losses = {"balance": balance_loss, "sequence": sequence_loss, "z": z_loss}
        if not all(_is_finite(weight) and weight >= 0 for weight in losses.values()):
            raise ConfigError(f"Router: {balance_loss=}, {sequence_loss=}, {z_loss=}; give weights of at least 0")
        if score == "logits" and (balance_loss or sequence_loss):
            raise ConfigError(
                f"Router: {balance_loss=}, {sequence_loss=} with score='logits', whose shares may be negative; choose "
                "another score, or 0"
            )
        if balance_scope not in BALANCE_SCOPES:
            raise ConfigError(f"Router: {balance_scope=}; one of {', '.join(BALANCE_SCOPES)}")
        if balance_scope == "global_batch" and not balance_loss:
            raise ConfigError(f"Router: {balance_scope=} without a balance_loss; give its weight, or leave it out")
        self.num_experts, self.top_k, self.bias_rate = num_experts, top_k, bias_rate
        self.balances_step = balance_scope == "global_batch"
        self.keeps_load = False
        self.choice = {
            "top_k": top_k,
            "score": score,
            "normalize": normalize,
            "scale": scale,
            "groups": groups,
            "top_groups": top_groups,
        }
        self.capacity_factor, self.capacity_by = capacity_factor, capacity_by
        self.losses = losses
        self.weight = self.create_parameter([d_model, num_experts], weight_attr, dims=("embed", None))
        self.bias = self.create_parameter([num_experts], is_bias=True, dims=(None,)) if bias else None
        if selection_bias or bias_rate:
            self.register_buffer("selection_bias", creation.zeros([num_experts], dtypes.float32))
        else:
            self.selection_bias = None
        if bias_rate or self.balances_step:
            self._count_steps()

    def keep_load(self) -> None:
        """Keep from now on where the choices of each training step went, of all its microbatches and all devices:
        last_load, int32 [num_experts], how many fell on each expert, and last_dropped, int32 0-D, how many a capacity
        left out. The optimizer's step ends a step; nothing waits for them before they are read.

        >>> router = Router(8, num_experts=4)
        >>> router.keep_load()
        >>> router.last_load.tolist(), router.last_dropped.item()
        ([0, 0, 0, 0], 0)
        """
        if self.keeps_load:
            return
        self.keeps_load = True
        self._count_steps()
        for name, shape in (("last_load", [self.num_experts]), ("step_dropped", []), ("last_dropped", [])):
            self.register_buffer(name, creation.zeros(shape, dtypes.int32), persistable=False)

    def _count_steps(self) -> None:
        if self.weight.after_update is None:
            self.register_buffer("step_load", creation.zeros([self.num_experts], dtypes.int32), persistable=False)
            self.weight.after_update = self._end_step

    def forward(self, x: Any, allowed: Any = None) -> Routing:
        """allowed: bool, broadcasts to [..., num_experts]: experts that a token may choose."""
        logits = F.router_logits(x, self.weight)
        logits = logits if self.bias is None else logits + self.bias.astype(logits.dtype)
        choices, gates, scores = F.choose_experts(logits, self.selection_bias, allowed, **self.choice)
        load = F.expert_load(choices, self.num_experts)
        loss = self._loss(logits, scores, choices, load)
        if self.capacity_factor is not None:
            capacity = self.capacity(math.prod(choices.shape[:-1]))
            choices = F.limit_experts(choices, gates, self.num_experts, capacity, self.capacity_by)
        if self._counts:
            self._count(load, choices)
        return Routing(choices, gates, loss, load)

    @property
    def _counts(self) -> bool:
        """Whether a forward adds to the counts of a step, which the weight's update ends."""
        if not self.training or not (self.bias_rate or self.keeps_load or self.balances_step):
            return False
        if self.weight.stop_gradient and self.balances_step:
            raise ConfigError(
                "Router: balance_scope='global_batch' with a frozen weight, whose update would end the counts of a "
                "step; give 'micro_batch', or a balance_loss of 0"
            )
        return not self.weight.stop_gradient

    def _count(self, load: Any, choices: Any) -> None:
        """Add to the step's load what this forward sent, and to what was dropped; choices: those that are left."""
        if state.recording():
            raise ConfigError(
                f"Router: bias_rate={self.bias_rate}, keep_load() or balance_scope='global_batch' in a Program, whose "
                "optimizer moves no bias and ends no count; give 0, and leave them out"
            )
        with no_grad():
            _add(self.step_load, load)
            if self.keeps_load and self.capacity_factor is not None:
                _add(self.step_dropped, load.sum() - (choices >= 0).sum())

    def _end_step(self, skip: Any) -> None:
        """Move the bias by the step's load, unless the step was skipped, keep it, and begin the next one's."""
        with no_grad():
            if self.bias_rate:
                load = self.step_load.astype(dtypes.float32)
                move = self.bias_rate * (load.mean() - load).sign()
                if skip is not None:
                    move = move * skip.logical_not().astype(move.dtype)
                _add(self.selection_bias, move)
            if self.keeps_load:
                state.write(self.last_load, state.read(self.step_load * 1))
                state.write(self.last_dropped, state.read(self.step_dropped * 1))
                state.write(self.step_dropped, state.read(self.step_dropped * 0))
            state.write(self.step_load, state.read(self.step_load * 0))

    def capacity(self, tokens: int) -> int:
        """Most choices that an expert takes of a batch of so many tokens; without a capacity_factor, of all."""
        return _share(self, tokens)

    def _loss(self, logits: Any, scores: Any, choices: Any, load: Any) -> Any:
        counts = self.step_load + load if self.balances_step and self.training else None
        terms = {
            "balance": lambda: F.balance_loss(scores, choices, counts=counts),
            "sequence": lambda: F.balance_loss(scores, choices, per_sequence=True),
            "z": lambda: F.router_z_loss(logits),
        }
        parts = [weight * terms[name]() for name, weight in self.losses.items() if weight]
        return sum(parts[1:], parts[0]) if parts else creation.zeros([], dtypes.float32)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}"


def _is_finite(number: Any) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(number)


def _add(buffer: Any, more: Any) -> None:
    state.write(buffer, state.read((buffer + more).astype(buffer.dtype)))


def _check_capacity(what: str, factor: float | None) -> None:
    if factor is not None and (not _is_finite(factor) or factor <= 0):
        raise ConfigError(f"{what}: capacity_factor={factor}; give a number above 0, or None to drop none")


def _check_scale(what: str, scale: float) -> None:
    if not _is_finite(scale) or scale == 0:
        raise ConfigError(f"{what}: scale={scale}; give a number that gates are multiplied by, 1 to leave them")


def _share(router: Any, tokens: int) -> int:
    """capacity_factor times an expert's even share of the choices of so many tokens, rounded up; all without one."""
    if router.capacity_factor is None:
        return tokens
    # as the factor is written: 1.1 * 10 in binary is more than 11
    share = Fraction(repr(float(router.capacity_factor))) * router.top_k / router.num_experts
    # in integers, as the number of tokens may be a symbol
    return -(-max(tokens, 1) * share.numerator // share.denominator)


class ExpertChoiceRouter(Layer):
    """Tokens for each expert by a linear map of them: [..., seq, d_model] -> Routing with as many choices as experts.

    In each sequence an expert chooses ceil(capacity_factor * seq * top_k / num_experts) tokens, those with the greatest
    scores for it, so that all experts compute equally many and no loss balances them. A token is chosen by top_k
    experts on the mean with a capacity_factor of 1, by more, fewer or none: what no expert chose gets 0. A choice of -1
    is of an expert that did not choose the token. score, scale: gates are these scores of choose_tokens, multiplied.
    z_loss: the weight of F.router_z_loss in Routing.loss.

    A token is chosen or not by comparison with later tokens too: a causal model trained so sees something of what it is
    to predict, and generates by other choices than it trained with. Source: arXiv:2202.09368. Weight and numbers are
    float32, as of a Router. Raises ConfigError for numbers that do not fit each other.

    >>> import polyreme as pr
    >>> routing = ExpertChoiceRouter(8, num_experts=4, top_k=1)(pr.randn([2, 12, 8]))
    >>> routing.choices.shape, routing.load.tolist()
    (paddle.Size([2, 12, 4]), [6, 6, 6, 6])
    """

    num_experts: int
    top_k: int
    capacity_factor: float
    score: str
    scale: float
    z_loss: float
    weight: Parameter

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float = 1.0,
        score: str = "softmax",
        scale: float = 1.0,
        z_loss: float = 0.0,
        weight_attr: ParamAttrLike = None,
    ) -> None:
        super().__init__()
        check_choice("ExpertChoiceRouter", num_experts, top_k, score, 1, 1)
        check_counts("ExpertChoiceRouter", d_model=d_model)
        _check_scale("ExpertChoiceRouter", scale)
        if not _is_finite(capacity_factor) or capacity_factor <= 0 or not _is_finite(z_loss) or z_loss < 0:
            raise ConfigError(
                f"ExpertChoiceRouter: {capacity_factor=}, {z_loss=}; give a capacity_factor above 0 and a weight of at "
                "least 0"
            )
        self.num_experts, self.top_k, self.capacity_factor = num_experts, top_k, capacity_factor
        self.score, self.scale, self.z_loss = score, scale, z_loss
        self.weight = self.create_parameter([d_model, num_experts], weight_attr, dims=("embed", None))

    def forward(self, x: Any, allowed: Any = None) -> Routing:
        """allowed: bool, broadcasts to [..., seq, num_experts]: tokens that an expert may choose."""
        logits = F.router_logits(x, self.weight)
        choices, gates, _ = F.choose_tokens(logits, allowed, self.capacity(x.shape[-2]), self.score, self.scale)
        loss = self.z_loss * F.router_z_loss(logits) if self.z_loss else creation.zeros([], dtypes.float32)
        return Routing(choices, gates, loss, F.expert_load(choices, self.num_experts))

    def capacity(self, tokens: int) -> int:
        """How many of a sequence of so many tokens an expert chooses, at most all."""
        return min(_share(self, tokens), max(tokens, 1))

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, capacity_factor={self.capacity_factor}"


class HashRouter(Layer):
    """Experts for each token by its id, or by any whole number, as that of its task: ids [...] -> Routing.

    Nothing is learned: the same id always goes to the same top_k neighbouring experts, with gates 1 / top_k, and the
    loss is 0. capacity_factor: as of a Router, in the tokens' order. seed: other experts for the ids. Source:
    arXiv:2106.04426, random hash. Raises ConfigError for numbers that do not fit each other, DTypeError for ids that
    are no integers, IndexError for an id below 0 or not below 2^31.

    >>> import polyreme as pr
    >>> router = HashRouter(num_experts=4, top_k=2)
    >>> router(pr.to_tensor([[7, 9, 7]])).gates.shape
    paddle.Size([1, 3, 2])
    """

    num_experts: int
    top_k: int
    capacity_factor: float | None
    factor: int
    offset: int

    def __init__(
        self, num_experts: int, top_k: int = 1, *, capacity_factor: float | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        check_choice("HashRouter", num_experts, top_k, "softmax", 1, 1)
        _check_capacity("HashRouter", capacity_factor)
        self.num_experts, self.top_k, self.capacity_factor = num_experts, top_k, capacity_factor
        self.factor, self.offset = (random.Random(seed).randrange(1, _PRIME) for _ in range(2))

    def forward(self, ids: Any) -> Routing:
        if not dtypes.is_integer(ids.dtype):
            raise DTypeError(f"HashRouter: ids are {ids.dtype}; give integers, the numbers of tokens or of their tasks")
        check_range(ids, 2**31, "HashRouter: id")
        # the product is below 2^62
        first = (ids.astype(dtypes.int64) * self.factor + self.offset) % _PRIME % self.num_experts
        choices = (first.unsqueeze(-1) + creation.arange(self.top_k)) % self.num_experts
        choices = choices.astype(dtypes.int32)
        gates = creation.full(choices.shape, 1 / self.top_k, dtypes.float32)
        load = F.expert_load(choices, self.num_experts)
        if self.capacity_factor is not None:
            capacity = _share(self, math.prod(ids.shape))
            choices = F.limit_experts(choices, gates, self.num_experts, capacity)
        return Routing(choices, gates, creation.zeros([], dtypes.float32), load)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}"


class MoE(Layer):
    """A mixture of experts: [batch, seq, d_model] -> the same, and the router's loss, to be added to the model's.

    Each token goes to top_k of num_experts networks, down(activation(gate(x)) * up(x)) of width d_hidden, or
    down(activation(up(x))) with gated=False; what they give is weighed by the router and summed. No token is dropped
    unless the router has a capacity. router: a Router, by default Router(d_model, num_experts, top_k or 2), an
    ExpertChoiceRouter, or a HashRouter, which takes the ids that are then given with the tokens; it says the top_k
    then. bias: up and down add one; gate_bias: gate too. shared_hidden: width of an expert that every token goes
    through, none if 0; shared_gate: its result is multiplied by sigmoid of a linear map of the token. activation: silu,
    gelu, gelu_tanh or relu; with a gate also clamped_swiglu, which takes gate(x) and up(x)
    (kernels.experts.clamped_swiglu).

    Parameters have the experts in front: up, gate [expert, embed, expert_ffn], down [expert, expert_ffn, embed]. A plan
    with ep splits them, its expert_dispatch says how tokens reach them. `changes` holds Layers by the names of these
    matrices, each a function of its matrix, whose result the experts compute with (nn.ExpertLoRA). In place of a matrix
    may stand QuantizedExperts. Sources: arXiv:1701.06538, arXiv:2401.06066.
    Raises ConfigError for sizes below 1 and for a router of other experts or another top_k.

    >>> import polyreme as pr
    >>> y, loss = MoE(8, 16, num_experts=4)(pr.ones([2, 3, 8]))
    >>> y.shape, loss.item()
    (paddle.Size([2, 3, 8]), 0.0)
    """

    d_model: int
    d_hidden: int
    num_experts: int
    activation: str
    gate: Any | None
    up: Any
    down: Any
    up_bias: Any | None
    gate_bias: Any | None
    down_bias: Any | None
    changes: LayerDict
    shared: SharedExpert | None

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        top_k: int | None = None,
        *,
        router: Router | ExpertChoiceRouter | HashRouter | None = None,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        gate_bias: bool = False,
        shared_hidden: int = 0,
        shared_gate: bool = False,
        weight_attr: ParamAttrLike = None,
    ) -> None:
        super().__init__()
        check_counts("MoE", d_model=d_model, d_hidden=d_hidden, num_experts=num_experts)
        if shared_gate and not shared_hidden:
            raise ConfigError(f"MoE: {shared_gate=} without shared_hidden; a shared gate needs a shared expert")
        if shared_hidden != 0:
            check_counts("MoE", shared_hidden=shared_hidden)
        known = {**ACTIVATIONS, **GATES} if gated else ACTIVATIONS
        if activation not in known:
            raise ConfigError(f"MoE: unknown activation {activation!r}; one of {', '.join(known)}")
        if gate_bias and not gated:
            raise ConfigError(f"MoE: {gate_bias=} with gated=False; there is no gate that could add it")
        self.d_model, self.d_hidden, self.num_experts, self.activation = d_model, d_hidden, num_experts, activation
        if router is None:
            router = Router(d_model, num_experts, 2 if top_k is None else top_k, weight_attr=weight_attr)
        elif getattr(router, "num_experts", None) is None:
            raise ConfigError(
                f"MoE: router is a {type(router).__name__}; give a Router, an ExpertChoiceRouter or a HashRouter"
            )
        elif top_k not in (None, router.top_k):
            raise ConfigError(f"MoE: {top_k=}, but a router of top_k={router.top_k}, which chooses; leave top_k out")
        self.router = router
        if router.num_experts != num_experts:
            raise ConfigError(f"MoE: {num_experts} experts, but a router of {router.num_experts}; give it as many")

        def weight(*dims: str) -> Any:
            sizes = {"expert": num_experts, "embed": d_model, "expert_ffn": d_hidden}
            is_bias = len(dims) == 2
            attr = weight_attr
            if is_bias or attr is None:
                fan_in, fan_out = (sizes[dim] for dim in dims[-2:])
                attr = None if is_bias else ParamAttr(initializer=XavierUniform(fan_in, fan_out))
            return self.create_parameter([sizes[dim] for dim in dims], attr, is_bias=is_bias, dims=dims)

        self.gate = weight("expert", "embed", "expert_ffn") if gated else None
        self.up = weight("expert", "embed", "expert_ffn")
        self.down = weight("expert", "expert_ffn", "embed")
        self.up_bias = weight("expert", "expert_ffn") if bias else None
        self.gate_bias = weight("expert", "expert_ffn") if gate_bias else None
        self.down_bias = weight("expert", "embed") if bias else None
        self.changes = LayerDict()
        self.shared = None
        if shared_hidden:
            self.shared = SharedExpert(d_model, shared_hidden, activation, gated, bias, shared_gate, weight_attr)

    def forward(self, x: Any, allowed: Any = None, ids: Any = None) -> tuple[Any, Any]:
        """allowed: bool, broadcasts to [..., num_experts]: experts that a token may choose. ids [...]: of the tokens,
        for a HashRouter, which heeds no `allowed`. Raises ConfigError for what the router does not take."""
        routing = self.route(x, allowed, ids)
        return self.mix(x, routing.choices, routing.gates), routing.loss

    def route(self, x: Any, allowed: Any = None, ids: Any = None) -> Routing:
        """Where the router sends tokens; arguments and errors of forward."""
        is_hashed = isinstance(self.router, HashRouter)
        if (ids is not None) != is_hashed or (is_hashed and allowed is not None):
            raise ConfigError(
                f"MoE: a {type(self.router).__name__} takes {'ids and no allowed' if is_hashed else 'no ids'}; "
                f"{'give ids [...] of the tokens x [..., d]' if is_hashed else 'leave them out, or give a HashRouter'}"
            )
        if is_hashed and ids.shape != x.shape[:-1]:
            raise ShapeError(f"MoE: ids {list(ids.shape)} of x {list(x.shape)}; give one id for each token")
        return self.router(ids) if is_hashed else self.router(x, allowed)

    def mix(self, x: Any, choices: Any, gates: Any) -> Any:
        """The outputs of the chosen experts, weighted by gates, plus the shared expert's: [..., d_model]."""
        if self.is_quantized and not self.changes and math.prod(choices.shape) < self.num_experts:
            out = self._mix_few(x, choices, gates)
            return out if self.shared is None else out + self.shared(x)
        matrices = self.matrices(x.dtype)
        changed = {name: change(matrices[name]) for name, change in self.changes.items()}
        up, down, gate = ((matrices | changed).get(name) for name in ("up", "down", "gate"))
        weights = (up, down, gate, self.up_bias, self.down_bias)
        out = chosen_experts(
            x, choices, gates, *weights, activation=self.activation, gate_bias=self.gate_bias,
            row_capacity=self.router.capacity(x.shape[-2]) if isinstance(self.router, ExpertChoiceRouter) else None,
        )  # fmt: skip
        return out if self.shared is None else out + self.shared(x)

    @property
    def is_quantized(self) -> bool:
        """Whether all of the experts' matrices are stored in few bits."""
        return all(isinstance(stored, QuantizedExperts) for stored in self.stored().values())

    def stored(self) -> dict[str, Any]:
        """What holds the experts' matrices, by their names: a parameter [expert, in, out], or QuantizedExperts."""
        named = {"up": self.up, "down": self.down, "gate": self.gate}
        return {name: stored for name, stored in named.items() if stored is not None}

    def matrices(self, dtype: Any = "float32") -> dict[str, Any]:
        """The experts' matrices by name: up, down and, if gated, gate, each [expert, in, out]; dtype: of those that are
        stored in few bits, and decoded."""
        return {
            name: stored.decoded(dtype) if isinstance(stored, QuantizedExperts) else stored
            for name, stored in self.stored().items()
        }

    def _mix_few(self, x: Any, choices: Any, gates: Any) -> Any:
        """chosen_experts of fewer choices than experts, of which those alone are decoded; a choice of -1 gives 0."""
        lead, k = list(choices.shape[:-1]), choices.shape[-1]
        experts = choices.reshape([-1]).clip(min=0)
        rows = x.unsqueeze(-2).expand([*lead, k, x.shape[-1]]).reshape([-1, 1, x.shape[-1]])

        def product(matrix: Any, rows: Any, bias: Any) -> Any:
            y = rows.matmul(matrix.decoded(x.dtype, experts))
            return y if bias is None else y + bias[experts].unsqueeze(1)

        gate = None if self.gate is None else product(self.gate, rows, self.gate_bias)
        hidden = _bent(self.activation, product(self.up, rows, self.up_bias), gate)
        out = product(self.down, hidden, self.down_bias).reshape([*lead, k, -1])
        shares = (gates * (choices >= 0).astype(gates.dtype)).astype(out.dtype)
        return (out * shares.unsqueeze(-1)).sum(-2)

    def extra_repr(self) -> str:
        return f"{self.d_model}, {self.d_hidden}, num_experts={self.num_experts}, activation={self.activation}"


def _bent(activation: str, up: Any, gate: Any = None) -> Any:
    """What an expert hands on to down, of Tensors."""
    if activation in GATES:
        return GATES[activation](gate, up, F.sigmoid)
    is_approximate = activation.endswith("_tanh")
    bend = functools.partial(F.gelu, approximate=True) if is_approximate else getattr(F, activation)
    return bend(up) if gate is None else bend(gate) * up


class SharedExpert(Layer):
    """The expert of an MoE that every token goes through: [..., d_model] -> the same."""

    gate: Linear | None
    up: Linear
    down: Linear
    token_gate: Linear | None

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        token_gate: bool = False,
        weight_attr: ParamAttrLike = None,
    ) -> None:
        super().__init__()

        def linear(ins: int, outs: int, *dims: str | None, with_bias: bool = bias) -> Linear:
            return Linear(ins, outs, weight_attr, None if with_bias else False, dims=dims)

        self.activation = activation
        self.gate = linear(d_model, d_hidden, "embed", "ffn", with_bias=False) if gated else None
        self.up = linear(d_model, d_hidden, "embed", "ffn")
        self.down = linear(d_hidden, d_model, "ffn", "embed")
        self.token_gate = linear(d_model, 1, "embed", None, with_bias=False) if token_gate else None

    def forward(self, x: Any) -> Any:
        if self.gate is None:
            hidden = _bent(self.activation, self.up(x))
        else:
            gate, up = map_each(x, self.gate, self.up)
            hidden = _bent(self.activation, up, gate)
        dims = ("batch", "block_seq", "ffn") if len(x.shape) == 3 else ("batch", "ffn")
        out = self.down(constrain(hidden, *dims))
        return out if self.token_gate is None else F.sigmoid(self.token_gate(x)) * out
