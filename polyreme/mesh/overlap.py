"""What a plan takes apart, so that one part is computed while another is on its way between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from polyreme.errors import ConfigError, did_you_mean

MP_OVERLAP = ("none", "ring")
"""How maps between a sequence and features that mp splits send: all at once, or part by part."""
SHARDING_OVERLAP = ("none", "ring")
"""How gradients that sharding splits are summed: all at once, or piece by piece as they are computed."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What is computed while something else is on its way.

    moe: parts that the tokens of a layer of experts are cut into; the experts of one compute while the next is sent to
    its experts and the last one back. 1 for none. mp: one of MP_OVERLAP; with "ring" the parts of a sequence that mp
    splits between blocks (sequence_parallel) go round, and each is multiplied while the next one comes
    (kernels/ring_linear.py), in place of an all-gather before the product and a reduce-scatter after it. sharding: one
    of SHARDING_OVERLAP; with "ring" the gradient of a linear map's weight, of which sharding keeps pieces (stages 2 and
    3), is summed piece by piece while the next is computed (kernels/ring_gradient.py). Raises ConfigError for what is
    no whole number of at least 1, and for an unknown word.

    >>> Overlap.of({"moe": 2})
    Overlap(moe=2, mp='none', sharding='none')
    """

    moe: int = 1
    mp: str = "none"
    sharding: str = "none"

    def __post_init__(self) -> None:
        if isinstance(self.moe, bool) or not isinstance(self.moe, int) or self.moe < 1:
            raise ConfigError(f"overlap.moe={self.moe!r} in plan; give a whole number of parts, 1 for no overlap")
        if self.mp not in MP_OVERLAP:
            raise ConfigError(f"overlap.mp={self.mp!r} in plan; one of {', '.join(MP_OVERLAP)}")
        if self.sharding not in SHARDING_OVERLAP:
            raise ConfigError(f"overlap.sharding={self.sharding!r} in plan; one of {', '.join(SHARDING_OVERLAP)}")

    def __str__(self) -> str:
        words = [f"moe in {self.moe} parts"] if self.moe > 1 else []
        rings = [f"{axis} by {how}" for axis, how in (("mp", self.mp), ("sharding", self.sharding)) if how != "none"]
        return ", ".join([*words, *rings]) or "none"

    def idle_text(self, platform: str) -> str:
        """What to tell whoever runs this on devices of a platform that hide nothing; "" where it may hide something.

        >>> Overlap(mp="ring").idle_text("cpu")
        'overlap (mp by ring) hides nothing on cpu, where devices wait for every collective; the numbers are the same'
        """
        if platform != "cpu" or self == Overlap():
            return ""
        return (
            f"overlap ({self}) hides nothing on {platform}, where devices wait for every collective; the numbers are "
            "the same"
        )

    @classmethod
    def of(cls, value: object) -> Overlap:
        """An Overlap, or one from a mapping of its fields. Raises ConfigError for anything else."""
        if isinstance(value, cls):
            return value
        names = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping):
            raise ConfigError(f"overlap={value!r} in plan; give a mapping such as {{moe: 2}}")
        for name in value:
            if name not in names:
                raise ConfigError(f"unknown key {name!r} in overlap of a plan{did_you_mean(name, names)}")
        return cls(**value)

    def to_dict(self) -> dict[str, int | str]:
        """Plain values, which `of` takes."""
        return asdict(self)
