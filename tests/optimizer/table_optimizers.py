"""One row per optimizer and setting: how it is made, and the independent run it must agree with."""

from dataclasses import dataclass, field
from typing import Any

import optax

from polyreme import optimizer as opt
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.regularizer import L1Decay, L2Decay
from tests.optimizer import oracles as o


@dataclass(frozen=True)
class Case:
    name: str
    cls: Any
    oracle: Any
    settings: dict = field(default_factory=dict)

    def make(self, parameters, **more):
        return self.cls(**{"learning_rate": 0.1, **self.settings, **more}, parameters=parameters)


CASES = [
    Case("sgd", opt.SGD, o.with_optax(optax.sgd(0.1))),
    Case("sgd_l2", opt.SGD, o.with_numpy(o.momentum(0.1, 0.0, decay=0.02)), {"weight_decay": 0.02}),
    Case("sgd_regularizer", opt.SGD, o.with_numpy(o.momentum(0.1, 0.0, decay=0.02)), {"weight_decay": L2Decay(0.02)}),
    Case("sgd_l1", opt.SGD,
         o.with_numpy(lambda p, g, s, t: p - 0.1 * (g + 0.02 * (p > 0) - 0.02 * (p < 0))),
         {"weight_decay": L1Decay(0.02)}),
    Case("sgd_clip", opt.SGD, o.with_optax(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))),
         {"grad_clip": ClipGradByGlobalNorm(0.5)}),
    Case("momentum", opt.Momentum, o.with_optax(optax.sgd(0.1, momentum=0.8)), {"momentum": 0.8}),
    Case("momentum_nesterov", opt.Momentum, o.with_optax(optax.sgd(0.1, momentum=0.8, nesterov=True)),
         {"momentum": 0.8, "use_nesterov": True}),
    Case("momentum_rescale", opt.Momentum, o.with_numpy(o.momentum(0.1, 0.8, scale=0.25, decay=0.02)),
         {"momentum": 0.8, "rescale_grad": 0.25, "weight_decay": 0.02}),
    Case("adam", opt.Adam, o.with_optax(optax.adam(0.1, 0.8, 0.95, 1e-6)),
         {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6}),
    Case("adam_amsgrad", opt.Adam, o.with_numpy(o.amsgrad(0.1, 0.8, 0.9, 1e-8)),
         {"beta1": 0.8, "beta2": 0.9, "amsgrad": True}),
    Case("adamw", opt.AdamW, o.with_optax(optax.adamw(0.1, weight_decay=0.05)), {"weight_decay": 0.05}),
    Case("adamw_fun", opt.AdamW, o.with_optax(optax.adamw(0.1, weight_decay=0.05, mask=[True, False])),
         {"weight_decay": 0.05, "apply_decay_param_fun": lambda name: name == "w"}),
    Case("adamw_ratio", opt.AdamW, o.with_optax(optax.adamw(0.05, weight_decay=0.05)),
         {"weight_decay": 0.05, "lr_ratio": lambda p: 0.5}),
    Case("adamax", opt.Adamax, o.with_numpy(o.adamax(0.1, 0.8, 0.95, 1e-8)), {"beta1": 0.8, "beta2": 0.95}),
    Case("adagrad", opt.Adagrad, o.with_numpy(o.adagrad(0.1, 1e-6))),
    Case("adagrad_start", opt.Adagrad, o.with_numpy(o.adagrad(0.1, 1e-6, 0.3)), {"initial_accumulator_value": 0.3}),
    Case("adadelta", opt.Adadelta, o.with_optax(optax.adadelta(0.1, 0.9, 1e-5)), {"rho": 0.9, "epsilon": 1e-5}),
    Case("rmsprop", opt.RMSProp, o.with_optax(optax.rmsprop(0.1, 0.9, 1e-5)), {"rho": 0.9, "epsilon": 1e-5}),
    Case("rmsprop_centered", opt.RMSProp, o.with_optax(optax.rmsprop(0.1, 0.9, 1e-5, centered=True, momentum=0.7)),
         {"rho": 0.9, "epsilon": 1e-5, "centered": True, "momentum": 0.7}),
    Case("lamb", opt.Lamb, o.with_optax(optax.lamb(0.1, 0.8, 0.95, 1e-6, weight_decay=0.03)),
         {"beta1": 0.8, "beta2": 0.95, "lamb_weight_decay": 0.03}),
    Case("lamb_excluded", opt.Lamb, o.with_numpy(o.lamb(0.1, 0.9, 0.999, 1e-6, 0.0, False)),
         {"exclude_from_weight_decay_fn": lambda p: True}),
    Case("lamb_always", opt.Lamb, o.with_numpy(o.lamb(0.1, 0.9, 0.999, 1e-6, 0.0, True)),
         {"lamb_weight_decay": 0.0, "always_adapt": True}),
    Case("asgd", opt.ASGD, o.with_numpy(o.asgd(0.1, 3)), {"batch_num": 3}),
    Case("nadam", opt.NAdam, o.with_numpy(o.nadam(0.1, 0.8, 0.95, 1e-6, 0.05)),
         {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "momentum_decay": 0.05}),
    Case("nadam_constant", opt.NAdam, o.with_numpy(o.nadam(0.1, 0.8, 0.95, 1e-6, 0.0)),
         {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "momentum_decay": 0.0}),
    Case("radam", opt.RAdam, o.with_numpy(o.radam(0.1, 0.9, 0.999, 1e-6)), {"epsilon": 1e-6}),
    Case("rprop", opt.Rprop, o.with_numpy(o.rprop(0.1, (0.02, 0.4), (0.4, 1.3))),
         {"learning_rate_range": (0.02, 0.4), "etas": (0.4, 1.3)}),
]  # fmt: skip
PLAIN = [c for c in CASES if "_" not in c.name or c.name in ("adam_amsgrad", "rmsprop_centered")]
"""One per optimizer, and those with slots of their own."""
