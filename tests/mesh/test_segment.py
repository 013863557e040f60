"""How attention over a split sequence exchanges: what "auto" takes, and which settings are refused."""

import pytest

from polyreme.errors import ConfigError
from polyreme.mesh import Plan, check_heads
from polyreme.mesh.segment import GATHERED_TOKENS, SegmentSettings, SegmentWay

LONG = 4096


@pytest.mark.parametrize(
    ("want", "ways", "heads", "kv_heads", "rest"),
    [
        # heads divide over all devices
        (("ulysses", 4), 4, 8, 4, {}),
        # or over those of a process, and keys between processes are less than what Ulysses would send there
        (("usp", 4), 8, 8, 8, {"near": 4}),
        (("ulysses", 8), 8, 8, 8, {"near": 2}),
        (("usp", 2), 8, 32, 8, {"near": 2}),
        # all keys are no larger than a device's queries
        (("gather", 1), 4, 8, 2, {}),
        (("gather", 1), 8, 32, 4, {"near": 2}),
        # a part of the devices divides the heads; within a process where one does
        (("usp", 4), 8, 12, 12, {}),
        (("usp", 2), 8, 12, 12, {"near": 2}),
        (("usp", 4), 8, 12, 12, {"near": 1}),
        # no part does
        (("ring", 1), 4, 3, 3, {}),
        (("gather", 1), 4, 3, 3, {"tokens": GATHERED_TOKENS - 1}),
        # Ulysses needs no order
        (("usp", 2), 4, 8, 8, {"settings": {"order": "zigzag"}}),
        (("ring", 1), 2, 8, 8, {"settings": {"order": "zigzag"}}),
        # what is asked for
        (("ring", 1), 4, 8, 8, {"settings": {"attention": "ring"}}),
        (("usp", 2), 8, 8, 8, {"settings": {"attention": "usp", "inner": 2}}),
        (("usp", 4), 8, 8, 8, {"settings": {"attention": "usp"}}),
    ],
)
def test_what_is_taken(want, ways, heads, kv_heads, rest):
    rest = {"near": ways, "tokens": LONG, **rest}
    settings = SegmentSettings(**rest.get("settings", {}))
    assert settings.way(ways, rest["tokens"], heads, kv_heads, rest["near"]) == SegmentWay(*want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sep": 2, "sep_attention": "usp"}, "sep in two degrees above 1, and sep=2 has none; set sep to 4"),
        ({"sep": 8, "sep_attention": "usp", "ulysses_degree": 8}, "ulysses_degree=8 .* sep=8; give 2 or 4"),
        ({"sep": 8, "sep_attention": "usp", "ulysses_degree": True}, "ulysses_degree=True"),
        ({"sep": 8, "ulysses_degree": 4}, "sep_attention 'auto': only 'usp' .*; set sep_attention to 'usp'"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        Plan.from_degrees(**settings)


def test_heads_that_cannot_be_dealt_out():
    with pytest.raises(
        ConfigError, match=r"'ulysses' splits 4 query .* 2 key heads over 4 devices \(sep\); make them 4,"
    ):
        check_heads(SegmentWay("ulysses", 4), 4, 4, 2, "sep")
    with pytest.raises(ConfigError, match=r"'usp' .* over 4 of 8 devices \(sep\); make them 4 or 8, or choose 'ring'"):
        check_heads(SegmentWay("usp", 4), 8, 6, 6, "sep")
    with pytest.raises(ConfigError, match=r"'usp' .* over a part of 4 devices \(sep\); no part divides both"):
        check_heads(SegmentWay("usp", 1), 4, 3, 3, "sep")
    check_heads(SegmentWay("ring", 1), 4, 3, 3, "sep")


def test_a_plan_says_and_keeps_it():
    plan = Plan.from_degrees(sep=8, sep_attention="usp", ulysses_degree=4)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "usp attention (4 deal heads out), auto order" in str(plan)
