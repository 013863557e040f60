"""Rotary positions: tables of angles, how published models stretch them over longer texts, and the rotation itself.

Source: arXiv:2104.09864 (the two halves of a head are rotated against each other).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from polyreme.errors import ConfigError, did_you_mean
from polyreme.models.files.published import Conversion, WeightRule, permuted, transposed
from polyreme.ops.manipulation import concat

Table = tuple[np.ndarray, np.ndarray]
"""Cosines and sines by which queries and keys are turned, float32 [seq, dims that are turned]."""


class FrequencyScaling(Protocol):
    """How rotary positions are stretched."""

    def table(self, seq_len: int, width: int, theta: float) -> Table: ...


@dataclass(frozen=True)
class LinearScaling:
    """Every pair of dims turns `factor` times slower. Source: arXiv:2306.15595."""

    factor: float
    type: str = "linear"

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError(f"rope_scaling: factor {self.factor}; give at least 1")

    def table(self, seq_len: int, width: int, theta: float) -> Table:
        """As rotary_table."""
        return rotary_table(seq_len, width, theta, 1 / self.factor)


@dataclass(frozen=True)
class DynamicScaling:
    """Rotary positions as they are for texts of at most original_max_position_embeddings tokens; those of longer ones
    would turn otherwise with each token more. Raises ConfigError for a table of more places."""

    factor: float
    original_max_position_embeddings: int
    type: str = "dynamic"

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError(f"rope_scaling: factor {self.factor}; give at least 1")
        _check_length(self.original_max_position_embeddings)

    def table(self, seq_len: int, width: int, theta: float) -> Table:
        """As rotary_table."""
        if seq_len > self.original_max_position_embeddings:
            raise ConfigError(
                f"rope_scaling: dynamic, for {seq_len} places; past {self.original_max_position_embeddings} all tokens "
                f"turn anew with each that comes, which no cache can follow; give seq_len at most "
                f"{self.original_max_position_embeddings}, or a scaling of another type"
            )
        return rotary_table(seq_len, width, theta)


@dataclass(frozen=True)
class Llama3Scaling:
    """Pairs of dims that turn less than low_freq_factor times over the original length turn `factor` times slower,
    those that turn more than high_freq_factor times as ever, those between in part. Source: arXiv:2407.21783 and its
    public configuration."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    type: str = "llama3"

    def __post_init__(self) -> None:
        if self.factor < 1 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                f"rope_scaling: factor {self.factor}, low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}; give a factor of at least 1, and 0 < low_freq_factor < high_freq_factor"
            )
        _check_length(self.original_max_position_embeddings)

    def table(self, seq_len: int, width: int, theta: float) -> Table:
        """As rotary_table."""
        turns = self.original_max_position_embeddings * _frequencies(width, theta) / (2 * math.pi)
        fast = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return rotary_table(seq_len, width, theta, fast + (1 - fast) / self.factor)


@dataclass(frozen=True)
class Yarn:
    """Rotary positions for texts longer than original_max_position_embeddings tokens. Source: arXiv:2309.00071.

    Pairs of dims that turn less than beta_slow times over the original length turn `factor` times slower, those that
    turn more than beta_fast times as ever, those between in part; with truncate the borders are whole pairs. mscale,
    mscale_all_dim: queries and keys are turned
    by cosines and sines times m(mscale) / m(mscale_all_dim), scores are multiplied by m(mscale_all_dim)^2, with m(s) =
    0.1 s log(factor) + 1; where one of the two is 0, turned by those times attention_factor, m(1) if that is 0. Raises
    ConfigError for another type, a factor below 1, and betas that are not in order.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    truncate: bool = True
    type: str = "yarn"

    def __post_init__(self) -> None:
        if self.type != "yarn":
            raise ConfigError(f"rope_scaling: type {self.type!r}; yarn is the only one, else leave rope_scaling out")
        if self.factor < 1 or not 0 < self.beta_slow < self.beta_fast or self.original_max_position_embeddings < 1:
            raise ConfigError(
                f"rope_scaling: factor {self.factor}, beta_slow {self.beta_slow}, beta_fast {self.beta_fast} and "
                f"original_max_position_embeddings {self.original_max_position_embeddings}; give a factor and a "
                "length of at least 1, and 0 < beta_slow < beta_fast"
            )

    def table(self, seq_len: int, width: int, theta: float) -> Table:
        """As rotary_table."""

        def pair_that_turns(times: float) -> float:
            turns = self.original_max_position_embeddings / (2 * math.pi * times)
            return width * math.log(turns) / 2 / math.log(theta)

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        slow = np.clip((np.arange(width // 2) - first) / max(last - first, 1e-3), 0, 1)
        slowed = 1 - slow + slow / self.factor
        if self.mscale and self.mscale_all_dim:
            scale = self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        else:
            scale = self.attention_factor or self._magnitude(1.0)
        cos, sin = rotary_table(seq_len, width, theta, slowed)
        return cos * np.float32(scale), sin * np.float32(scale)

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1


@dataclass(frozen=True)
class LongRope:
    """Each pair of dims turns a number of times slower of its own: by short_factor in texts of at most
    original_max_position_embeddings tokens, by long_factor in longer ones. Source: arXiv:2402.13753.

    Cosines and sines are multiplied by attention_factor; where that is 0 by sqrt(1 + log(factor) / log(original
    length)), factor, if above 1, being the length of the model's texts over the original one. Raises ConfigError for
    factors of other lengths and for one that is not positive.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float = 1.0
    attention_factor: float = 0.0
    type: str = "longrope"

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not isinstance(factors, (list, tuple)) or any(not _is_positive(value) for value in factors):
                raise ConfigError(f"rope_scaling: {name} {factors!r}; give a positive number for each pair of dims")
            object.__setattr__(self, name, tuple(map(float, factors)))
        if len(self.short_factor) != len(self.long_factor) or self.factor <= 0 or self.attention_factor < 0:
            raise ConfigError(
                f"rope_scaling: {len(self.short_factor)} numbers of short_factor, {len(self.long_factor)} of "
                f"long_factor, factor {self.factor}, attention_factor {self.attention_factor}; give as many of both, "
                "and positive ones"
            )
        _check_length(self.original_max_position_embeddings)

    def table(self, seq_len: int, width: int, theta: float) -> Table:
        """As rotary_table."""
        factors = self.long_factor if seq_len > self.original_max_position_embeddings else self.short_factor
        if len(factors) != width // 2:
            raise ConfigError(
                f"rope_scaling: {len(factors)} numbers of short_factor and long_factor; {width} dims are turned, which "
                f"are {width // 2} pairs"
            )
        cos, sin = rotary_table(seq_len, width, theta, 1 / np.array(factors))
        return cos * np.float32(self.magnitude), sin * np.float32(self.magnitude)

    def written(self, seq_len: int) -> dict[str, Any]:
        """Its fields in config.json, where the original length stands beside them: the three that the reference takes,
        and attention_factor where it follows from no length."""
        fields = {"type": self.type, "short_factor": [*self.short_factor], "long_factor": [*self.long_factor]}
        implied = replace(self, factor=seq_len / self.original_max_position_embeddings, attention_factor=0.0)
        is_implied = implied.magnitude == self.magnitude
        return fields if is_implied else {**fields, "attention_factor": self.magnitude}

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor or self.factor <= 1:
            return self.attention_factor or 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))


SCALINGS: dict[str, type] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": Yarn,
    "longrope": LongRope,
}
"""By the type that a configuration names."""


def read_scaling(given: Mapping[str, Any] | FrequencyScaling | None, types: tuple[str, ...] = tuple(SCALINGS)) -> Any:
    """The scaling that fields of a configuration say, None for none.

    given: its fields and `type` (or `rope_type`), "default" for none. Raises ConfigError for a type that is not in
    types, and for fields that are missing or that the type has not.
    """
    if not isinstance(given, Mapping):
        return given
    fields = dict(given)
    kind = fields.pop("rope_type", fields.pop("type", types[0] if len(types) == 1 else "default"))
    fields.pop("type", None)
    if kind == "default":
        return None
    if kind not in types:
        raise ConfigError(f"rope_scaling: unknown type {kind!r}{did_you_mean(str(kind), types)}")
    try:
        return SCALINGS[kind](**fields)
    except TypeError as error:
        raise ConfigError(
            f"rope_scaling {dict(given)}: {str(error).partition(') ')[2] or error}; give the fields of "
            f"polyreme.models.parts.rotary.{SCALINGS[kind].__name__}"
        ) from None


ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""What config.json says of rotary positions."""
_WHOLE = ("rotary_fraction", 1)


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta, rope_scaling and where it is said rotary_fraction, from what config.json says in its older spelling
    or in its newer."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    fraction = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    fields = {"rope_theta": theta, "rotary_fraction": fraction}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("su", "longrope"):
        _complete_longrope(scaling, config)
    elif kind in ("dynamic", "llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    said = {name: float(value) for name, value in fields.items() if value is not None and (name, value) != _WHOLE}
    return said | {"rope_scaling": read_scaling(scaling)}


def _complete_longrope(scaling: dict[str, Any], config: Mapping[str, Any]) -> None:
    """What config.json says of it elsewhere; "su" is its first name."""
    scaling["rope_type"] = "longrope"
    longest, original = config["max_position_embeddings"], config.get("original_max_position_embeddings")
    if original:  # the reference then takes the ratio for the factor, whatever that says
        scaling["factor"] = longest / original
    scaling.setdefault("original_max_position_embeddings", original or longest)


def write_rope(config: Any) -> dict[str, Any]:
    """What config.json says of rotary positions, in the spelling that older and newer programs read."""
    scaling = config.rope_scaling
    fields = None
    more: dict[str, Any] = {} if config.rotary_fraction == 1 else {"partial_rotary_factor": config.rotary_fraction}
    if scaling is not None:
        # 0 stands for what follows from the others
        given = asdict(scaling).items()
        fields = {key: value for key, value in given if key != "type" and (value != 0 or value is False)}
        fields["rope_type"] = scaling.type
    if isinstance(scaling, LongRope):
        fields, more = (
            scaling.written(config.seq_len),
            more | {"original_max_position_embeddings": scaling.original_max_position_embeddings},
        )
    return {"rope_theta": config.rope_theta, "rope_scaling": fields, **more}


def rotary_table(seq_len: int, head_dim: int, theta: float, slowed: np.ndarray | float = 1.0) -> Table:
    """(cos, sin) of position * theta^(-2 i / head_dim) * slowed[i], float32 [seq, head_dim], the half repeated."""
    frequency = _frequencies(head_dim, theta) * slowed
    angle = np.arange(seq_len)[:, None] * np.concatenate([frequency, frequency])[None]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x_bshd: Any, cos_sd: Any, sin_sd: Any) -> Any:
    """x with each pair (i, i + dims / 2) of its first dims rotated by its position's angle, as many as the tables [seq,
    dims] have; a table for each row, [batch, seq, dims], where rows are at other positions. None turns nothing."""
    if cos_sd is None:
        return x_bshd
    width = cos_sd.shape[-1]
    if width < x_bshd.shape[-1]:
        return concat([rotate(x_bshd[..., :width], cos_sd, sin_sd), x_bshd[..., width:]], axis=-1)
    half = width // 2
    turned = concat([-x_bshd[..., half:], x_bshd[..., :half]], axis=-1)
    cos, sin = cos_sd.unsqueeze(-2).astype(x_bshd.dtype), sin_sd.unsqueeze(-2).astype(x_bshd.dtype)
    return x_bshd * cos + turned * sin


def neighbours(heads: str) -> Conversion:
    """A vector, or the last dim of a matrix, whose heads turn pairs of neighbouring dims there, and here pairs that lie
    half the turned dims apart. heads: the field that counts them of the config, which has head_dim and rotary_width."""

    def reordered(array: np.ndarray, config: Any, split: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        parts = array.reshape(*array.shape[:-1], getattr(config, heads), config.head_dim).copy()
        turned = parts[..., : config.rotary_width]
        turned[...] = split(turned.copy()).swapaxes(-1, -2).reshape(turned.shape)
        return parts.reshape(array.shape)

    return permuted(
        lambda array, config: reordered(array, config, lambda pairs: pairs.reshape(*pairs.shape[:-1], 2, -1)),
        lambda array, config: reordered(array, config, lambda pairs: pairs.reshape(*pairs.shape[:-1], -1, 2)),
    )


def neighbour_rules(theirs: str, ours: str, heads: str) -> tuple[WeightRule, ...]:
    """The weight and the bias of a linear map to heads that turn neighbours; heads: as of neighbours."""
    change = neighbours(heads)
    return (
        WeightRule(f"{theirs}.weight", f"{ours}.weight", transposed(change)),
        WeightRule(f"{theirs}.bias", f"{ours}.bias", change),
    )


def _frequencies(width: int, theta: float) -> np.ndarray:
    """Radians a position of each pair of dims, float64 [width / 2]."""
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _check_length(original: int) -> None:
    if original < 1:
        raise ConfigError(f"rope_scaling: original_max_position_embeddings {original}; give at least 1")
