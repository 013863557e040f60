"""MoELayer: a gate, and experts that are Layers of any kind; and the clip that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyreme.core import state
from polyreme.distributed.communication.group import Group
from polyreme.distributed.models.moe.gates import BaseGate, GShardGate, NaiveGate, SwitchGate
from polyreme.distributed.recompute_calls import recompute, recompute_hybrid
from polyreme.errors import ConfigError, ShapeError, did_you_mean
from polyreme.jit import to_static
from polyreme.jit.row_experts import call_experts
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.nn.layer import Layer
from polyreme.nn.layers.batch_norm import _BatchNorm
from polyreme.nn.layers.container import LayerList
from polyreme.nn.parameter_entry import put_together
from polyreme.ops.arithmetic import cast
from polyreme.ops.manipulation import reshape

GATES: dict[str, type[NaiveGate]] = {"naive": NaiveGate, "gshard": GShardGate, "switch": SwitchGate}


class MoELayer(Layer):
    """A mixture of experts: [batch, seq, d_model] -> the same; gate.get_loss() has the loss that balances them.

    experts: all of them, on one device or many, Layers that map tokens [n, d_model] to the same, every token by itself.
    gate: a NaiveGate or one derived from it, or {"type": "gshard" (the default), "switch", "naive" or None, "top_k":
    2}. Experts of one structure run on the rows that chose them and on no others; others, and those that draw random
    numbers, run on all tokens, whose results are masked. A choice of -1 adds nothing. Under a plan with ep tokens reach
    experts as its expert_dispatch says.

    Experts whose parameters have the same names and shapes keep each for all of them, [expert, ...], which a plan with
    ep splits, its gradient and optimizer state with it. That one is in parameters(), named experts.*.NAME, and is
    frozen or trained for all; what takes a norm of each parameter (Lamb, Lars, ClipGradByNorm) takes each expert's.
    state_dict() and the experts themselves have each expert's own, an entry of it. Experts that differ, in what is
    frozen too, are whole on every device.

    moe_group, mp_group: groups over mesh axes, which change nothing, as Tensors are global. recompute_interval above 0
    runs experts again in backward; recompute_ctx: how, as recompute_hybrid takes it. Raises ConfigError for a gate of
    another number of experts, for a group of several processes, and for experts with batch statistics.

    >>> import polyreme as pr
    >>> layer = MoELayer(8, [pr.nn.Linear(8, 8) for _ in range(4)], gate={"type": "naive", "top_k": 2})
    >>> layer(pr.ones([2, 3, 8])).shape
    paddle.Size([2, 3, 8])
    """

    d_model: int
    num_expert: int
    group: Group | None
    mp_group: Group | None
    recompute_interval: int
    recompute_ctx: Mapping[str, Any] | None
    gate: NaiveGate
    top_k: int

    def __init__(
        self,
        d_model: int,
        experts: Sequence[Layer],
        gate: Mapping[str, Any] | BaseGate | None = None,
        moe_group: Group | None = None,
        mp_group: Group | None = None,
        recompute_interval: int = 0,
        recompute_ctx: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_group("MoELayer: moe_group", moe_group)
        check_group("MoELayer: mp_group", mp_group)
        self.experts = experts if isinstance(experts, LayerList) else LayerList(list(experts))
        self.d_model, self.num_expert = d_model, len(self.experts)
        self.group, self.mp_group = moe_group, mp_group
        self.recompute_interval, self.recompute_ctx = recompute_interval, recompute_ctx
        _check_experts(self.experts)
        if not state.recording():
            put_together(list(self.experts), "expert")
        self.gate = _make_gate(gate, d_model, self.num_expert)
        self.top_k = self.gate.top_k
        self._captured = to_static(self._mix)

    def forward(self, inp: Any) -> Any:
        if len(inp.shape) != 3 or inp.shape[-1] != self.d_model:
            raise ShapeError(f"MoELayer: tokens {list(inp.shape)}; needs [batch, seq, {self.d_model}]")
        if 0 in inp.shape:  # no tokens, and nothing for gates to weigh
            return inp.clone()
        values, experts = self.gate(reshape(inp, [-1, self.d_model]))
        leading = [*inp.shape[:-1], -1]
        tokens = (inp, reshape(cast(experts, "int32"), leading), reshape(values, leading))
        if self.recompute_interval <= 0:
            return self._compute(*tokens)
        if self.recompute_ctx is None:
            return recompute(self._compute, *tokens)
        return recompute_hybrid({"mp_group": self.mp_group, **self.recompute_ctx}, self._compute, *tokens)

    def _compute(self, x: Any, choices: Any, gates: Any) -> Any:
        if state.recorder() is not None:
            return _masked(self.experts, x, choices, gates)
        # captured in eager code too: one program, whatever number of tokens an expert gets
        return self._captured(x, choices, gates)

    def _mix(self, x: Any, choices: Any, gates: Any) -> Any:
        experts = list(self.experts)
        weights = [[*expert.parameters(), *expert.buffers()] for expert in experts]
        out = call_experts(experts, weights, x, choices, gates)
        return _masked(self.experts, x, choices, gates) if out is None else out

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_expert={self.num_expert}"


class ClipGradForMOEByGlobalNorm(ClipGradByGlobalNorm):
    """ClipGradByGlobalNorm: gradients of experts are whole Tensors, so their norm is part of the one norm as it stands.

    is_expert_param_func and moe_group tell experts from other parameters where each process has experts of its own;
    here they change nothing. Raises ConfigError for a group of several processes.
    """

    moe_group: Group | None

    def __init__(
        self,
        clip_norm: float,
        is_expert_param_func: Callable[[Any], bool] | None = None,
        moe_group: Group | None = None,
        group_name: str = "default_moe_group",
    ) -> None:
        check_group("ClipGradForMOEByGlobalNorm: moe_group", moe_group)
        super().__init__(clip_norm, group_name)
        self.is_expert_param_func, self.moe_group = is_expert_param_func, moe_group


def check_group(what: str, group: Any) -> None:
    """Raise ConfigError for anything but a Group of one process or of mesh axes."""
    if group is None:
        return
    if not isinstance(group, Group):
        raise ConfigError(f"{what} must be a Group, got {type(group).__name__}")
    if not group.axes and group.nranks > 1:
        raise ConfigError(
            f"{what} has {group.nranks} processes; experts is the list of all experts here, which a plan with ep "
            "splits over devices: give all of them, and None or a group of mesh axes, such as fleet's "
            "get_hybrid_communicate_group().get_expert_parallel_group()"
        )


def _masked(experts: LayerList, x: Any, choices: Any, gates: Any) -> Any:
    """Every expert on all tokens, times what it weighs for each."""
    out = 0
    for e, expert in enumerate(experts):
        weight = (cast(choices == e, gates.dtype) * gates).sum(-1, keepdim=True)
        y = reshape(expert(reshape(x, [-1, x.shape[-1]])), x.shape)
        out = out + y * cast(weight, y.dtype)
    return cast(out, x.dtype)


def _check_experts(experts: LayerList) -> None:
    if not len(experts):
        raise ConfigError("MoELayer: experts is empty; give the list of all experts")
    for name, layer in experts.named_sublayers():
        if isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"MoELayer: experts.{name} is a {type(layer).__name__}, whose statistics would be those of the tokens "
                "that happen to choose an expert; use LayerNorm or GroupNorm"
            )


def _make_gate(gate: Any, d_model: int, experts: int) -> NaiveGate:
    if gate is None or isinstance(gate, Mapping):
        settings = {"type": "gshard", "top_k": 2, **(gate or {})}
        name = settings["type"] or "naive"
        if name not in GATES or len(settings) > 2:
            wrong = "" if name in GATES else did_you_mean(str(name), GATES)
            raise ConfigError(f"MoELayer: gate={dict(gate or {})}{wrong}; give a type of {', '.join(GATES)}, and top_k")
        return GATES[name](d_model, experts, 1, topk=settings["top_k"])
    if not isinstance(gate, NaiveGate):
        raise ConfigError(f"MoELayer: gate is a {type(gate).__name__}; give a dict, or a gate derived from NaiveGate")
    if gate.tot_expert != experts:
        raise ConfigError(
            f"MoELayer: a gate for {gate.num_expert} x {gate.world_size} = {gate.tot_expert} experts, but {experts} "
            "experts; experts is the list of all of them, on all devices"
        )
    return gate
