"""What a plan cuts into parts, so that one part is computed while another is on its way between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from polyreme.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many parts are computed while others are on their way.

    moe: parts that the tokens of a layer of experts are cut into; the experts of one compute while the next is sent to
    its experts and the last one back. 1 for none. Raises ConfigError for what is no whole number of at least 1.

    >>> Overlap.of({"moe": 2})
    Overlap(moe=2)
    """

    moe: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.moe, bool) or not isinstance(self.moe, int) or self.moe < 1:
            raise ConfigError(f"overlap.moe={self.moe!r} in plan; give a whole number of parts, 1 for no overlap")

    def __str__(self) -> str:
        return ", ".join(f"{name} in {parts} parts" for name, parts in self.to_dict().items() if parts > 1) or "none"

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

    def to_dict(self) -> dict[str, int]:
        """Plain values, which `of` takes."""
        return asdict(self)
