"""Rewards by rule for texts that a model writes, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from polyreme.errors import ConfigError, did_you_mean
from polyreme.evaluation.metrics import is_exact, rouge_l
from polyreme.registry import Registry

Reward = Callable[[str, str], float]
"""(text, the answer that is known) -> how good the text is."""


@dataclass(frozen=True, slots=True, eq=False)
class RewardRule:
    """A reward by its name."""

    name: str
    of: Reward
    aliases: tuple[str, ...] = ()


REWARDS: Registry[RewardRule] = Registry(
    "reward",
    [
        RewardRule("exact_match", lambda text, answer: float(is_exact(text, [answer]))),
        RewardRule("rouge_l", lambda text, answer: rouge_l(text, [answer])),
        RewardRule("contains", lambda text, answer: float(answer.strip() in text)),
    ],
)
"""Rewards by their name."""


def load_reward(name: str) -> Reward:
    """The reward of this name, or a function of your own as "module:function". Raises ConfigError for neither,
    and where a function of your own fails or gives no finite number.

    >>> load_reward("contains")("it is Paris.", "Paris")
    1.0
    """
    if ":" not in name:
        return REWARDS.named(REWARDS.canonical_name(name)).of
    module, _, function = name.partition(":")
    try:
        names = vars(import_module(module))
    except Exception as error:  # noqa: BLE001  (a module of the user's)
        raise ConfigError(f"reward={name}: {error}; give module:function of a module that can be imported") from None
    if not callable(names.get(function)):
        raise ConfigError(f"reward={name}: {module} has no function {function!r}{did_you_mean(function, names)}")
    return _judge(name, names[function])


def _judge(name: str, function: Reward) -> Reward:
    """A function of the user's, whose faults are told as such."""

    def judge(text: str, answer: str) -> float:
        try:
            reward = float(function(text, answer))
        except Exception as error:
            what = f"reward={name} of {text[:80]!r} failed: {type(error).__name__}: {error}"
            raise ConfigError(f"{what}; it takes (text, known answer) and gives a number") from error
        if not math.isfinite(reward):
            raise ConfigError(f"reward={name} of {text[:80]!r} is {reward}; give a finite number")
        return reward

    return judge
