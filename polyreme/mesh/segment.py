"""How attention sees the whole of a sequence that is split over devices: the settings, and the rule of "auto"."""

from __future__ import annotations

from typing import NamedTuple

from polyreme.errors import ConfigError
from polyreme.mesh.axes import nearest_multiples

SEP_ATTENTION = ("auto", "ulysses", "ring", "gather", "usp")
"""How attention sees the whole sequence when `sep` splits it: an all-to-all that splits heads instead, keys and values
passed round a ring, all of them gathered, or heads split among near devices and keys round a ring of far ones."""

SEP_ORDER = ("auto", "contiguous", "zigzag")
"""Which tokens a device holds when `sep` splits the sequence: a run of them, or an early and a late one, so that all
devices work as long under a causal mask; auto takes the second where a model says that it can."""

GATHERED_TOKENS = 512
"""Tokens of a row on a device below which keys whose heads no part of the devices divides are gathered. A ring's step
computes about tokens x heads / (2 x key heads) FLOP for each byte that it sends in 16 bits, and devices of today do 300
to 6,000 while a link moves one: below, it would wait for what it sends."""


class SegmentWay(NamedTuple):
    """How attention exchanges: one of SEP_ATTENTION but "auto", and among how many neighbours heads are dealt out."""

    how: str
    inner: int


class SegmentSettings(NamedTuple):
    """What a plan says of it: Plan.sep_attention, sep_order and ulysses_degree."""

    attention: str = "auto"
    order: str = "auto"
    inner: int | None = None

    def check(self, ways: int) -> None:
        """Raise ConfigError for settings that do not go together over so many devices."""
        if self.order == "zigzag" and (ways == 1 or self.attention == "ulysses"):
            why = "sep=1 splits no sequence; set sep" if ways == 1 else _NO_RING
            raise ConfigError(f"sep_order 'zigzag' in a plan with {why}, or leave sep_order at 'auto'")
        if self.inner is not None and self.attention != "usp":
            raise ConfigError(
                f"ulysses_degree={self.inner!r} in a plan with sep_attention {self.attention!r}: only 'usp' deals "
                "heads out among a part of sep; set sep_attention to 'usp', or leave ulysses_degree out"
            )
        if self.attention != "usp":
            return
        fitting = _proper_divisors(ways)
        if not fitting:
            raise ConfigError(
                f"sep_attention 'usp' splits sep in two degrees above 1, and sep={ways} has none; set sep to 4, or "
                "sep_attention to 'ulysses' or 'ring'"
            )
        if self.inner is not None and (isinstance(self.inner, bool) or self.inner not in fitting):
            raise ConfigError(
                f"ulysses_degree={self.inner!r} in a plan with sep={ways}; give "
                f"{' or '.join(map(str, fitting))}, and the ring goes round the other {ways}/degree"
            )

    def way(self, ways: int, tokens: int, heads: int, kv_heads: int, near: int) -> SegmentWay:
        """How attention of a row that is split in so many ways exchanges.

        tokens: of a row on a device. heads, kv_heads: query and key heads of a device. near: neighbours along the split
        that share a process. "auto" is, in this order,

        - "ulysses" where the devices divide both kinds of heads and the order is not "zigzag"; but "usp" where it would
          go between processes, each divides the heads, and their number x key heads is at most query and key heads:
          what a ring between them sends is then no more;
        - "gather" where key heads x devices are no more than query heads: all keys and values are then no larger than
          the queries and the result of a device, and nothing sends less;
        - "usp" where a part of the devices divides the heads: as many as do, within a process if any do there;
        - "gather" for fewer than GATHERED_TOKENS tokens, else "ring".

        Heads that do not divide are not refused: check_heads does.

        >>> SegmentSettings().way(4, 1024, 8, 8, 4), SegmentSettings().way(4, 1024, 8, 2, 4)
        (SegmentWay(how='ulysses', inner=4), SegmentWay(how='gather', inner=1))
        """
        dealing = [n for n in _proper_divisors(ways) if heads % n == 0 and kv_heads % n == 0]
        most = max([n for n in dealing if near % n == 0] or dealing, default=1)
        if self.attention == "ulysses":
            return SegmentWay("ulysses", ways)
        if self.attention == "usp":
            return SegmentWay("usp", self.inner or most)
        if self.attention != "auto":
            return SegmentWay(self.attention, 1)
        if self.order != "zigzag" and heads % ways == 0 and kv_heads % ways == 0:
            is_far = near in dealing and ways // near * kv_heads <= heads + kv_heads
            return SegmentWay("usp", near) if is_far else SegmentWay("ulysses", ways)
        if kv_heads * ways <= heads:
            return SegmentWay("gather", 1)
        if dealing:
            return SegmentWay("usp", most)
        return SegmentWay("gather" if tokens < GATHERED_TOKENS else "ring", 1)


def check_heads(way: SegmentWay, ways: int, heads: int, kv_heads: int, axes: str) -> None:
    """Raise ConfigError for heads of a device that the way cannot deal out; axes: those that split the sequence."""
    if way.how not in ("ulysses", "usp") or (way.inner > 1 and heads % way.inner == 0 and kv_heads % way.inner == 0):
        return
    among = f"{way.inner} devices" if way.inner == ways else f"{way.inner} of {ways} devices"
    advice = f"make them {nearest_multiples(kv_heads, way.inner)}"
    if way.how == "usp" and way.inner == 1:
        among, advice = f"a part of {ways} devices", "no part divides both; change the heads"
    raise ConfigError(
        f"plan: sep_attention {way.how!r} splits {heads} query heads and {kv_heads} key heads over {among} "
        f"({axes}); {advice}, or choose 'ring' or 'gather'"
    )


def _proper_divisors(number: int) -> list[int]:
    """Those above 1 and below the number, rising."""
    return [n for n in range(2, number) if number % n == 0]


_NO_RING = (
    "sep_attention 'ulysses', whose devices all see the whole sequence and need no order; set sep_attention to 'ring'"
)
