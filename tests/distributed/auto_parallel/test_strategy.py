"""Strategy: sections and fields, what they mean, and what is refused."""

import copy
import importlib.util
import warnings
from pathlib import Path

import pytest

from polyreme.distributed.auto_parallel.engine.strategy import Strategy, settle
from polyreme.distributed.auto_parallel.engine.strategy_fields import FIELDS
from polyreme.distributed.settings import REFUSED, walk
from polyreme.errors import ConfigError, PlacementError, StrategyError

ROOT = Path(__file__).parents[3]
LISTED = Path(__file__).with_name("strategy_fields.txt")
CHANGED = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 1.0, str: lambda v: v + "x"}


def _other(field):
    """A value that is not the field's default."""
    if field.default is None:
        return field.item(1)
    if isinstance(field.default, list):
        return [field.item()]
    return CHANGED[type(field.default)](field.default)


def test_sections_are_read_and_set_by_attribute_key_and_dict():
    sections = {"sharding": {"enable": True, "stage": 2}, "seed": 7}
    strategy = Strategy(sections)
    strategy.pipeline = {"accumulate_steps": 4}
    strategy.amp["dtype"] = "bfloat16"
    assert (strategy.sharding.stage, strategy.pipeline.accumulate_steps, strategy.amp.dtype) == (2, 4, "bfloat16")
    assert strategy.given() == {**sections, "pipeline": {"accumulate_steps": 4}, "amp": {"dtype": "bfloat16"}}
    assert Strategy(strategy.given()) == strategy == copy.deepcopy(strategy) != Strategy()
    assert strategy.to_dict()["gradient_merge"] == {"enable": False, "k_steps": 1, "avg": True}
    assert "sharding.stage" in repr(strategy)


def test_names_and_defaults_of_the_public_api():
    """strategy_fields.txt: what PaddlePaddle 3.3.1's auto.Strategy() (and dist.Strategy(), for fused_passes) holds."""
    listed = dict(line.split(" ", 1) for line in LISTED.read_text().splitlines())
    assert {name: repr(field.default) for name, field in walk(FIELDS)} == listed
    strategy = Strategy()
    assert {name: repr(_at(strategy, name)) for name in listed} == listed


def _at(strategy, name):
    section, _, key = name.rpartition(".")
    return getattr(strategy.get(section) if section else strategy, key)


def test_the_page_lists_what_each_setting_does():
    spec = importlib.util.spec_from_file_location("write_fleet_table", ROOT / "tools" / "write_fleet_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = (ROOT / "docs" / "auto_parallel.md").read_text()
    assert tool.table(FIELDS) in page, "run: python tools/write_fleet_table.py"


def test_wrong_names_and_types():
    with pytest.raises(ValueError, match="takes a dict of settings or nothing, got list"):
        Strategy([])
    with pytest.warns(UserWarning, match="'stagee', which is passed over; did you mean 'stage'"):
        assert not Strategy({"sharding": {"stagee": 3}}).changed()
    with pytest.raises(StrategyError, match="fused_passes has no setting 'relu'"):
        Strategy({"fused_passes": {"relu": True}})
    with pytest.raises(StrategyError, match=r"Strategy.sharding has no setting 'stagee'"):
        Strategy().sharding.stagee = 3
    with pytest.raises(AttributeError, match="did you mean 'sharding'"):
        _ = Strategy().shardin
    with pytest.raises(StrategyError, match=r"Strategy.sharding.stage is a whole number, got '2'"):
        Strategy({"sharding": {"stage": "2"}})
    with pytest.raises(StrategyError, match=r"Strategy.amp is a section, got True"):
        Strategy().amp = True


@pytest.mark.parametrize("name", [name for name, field in walk(FIELDS) if field.kind == REFUSED])
def test_what_cannot_be_honoured_is_refused_where_it_counts(name):
    section, _, key = name.rpartition(".")
    strategy = Strategy()
    target = strategy.get(section) if section else strategy
    field = dict(walk(FIELDS))[name]
    setattr(target, key or name, _other(field))
    if section and "enable" in target and key != "enable":
        settle(strategy)  # a section that is off does not count
        target.enable = True
    with pytest.raises(ConfigError, match=f"(?s)not supported: .*{name}="):
        settle(strategy)


def test_every_field_that_is_not_refused_settles():
    for name, field in walk(FIELDS):
        section, _, key = name.rpartition(".")
        if field.kind != REFUSED and not isinstance(field.default, str):
            strategy = Strategy()
            setattr(strategy.get(section) if section else strategy, key, _other(field))
            settle(strategy)


def test_what_a_strategy_means():
    settings = settle(
        Strategy(
            {
                "amp": {"enable": True, "level": "o2", "dtype": "bfloat16", "use_master_grad": True},
                "sharding": {"enable": True, "stage": 3, "degree": 2},
                "gradient_merge": {"enable": True, "k_steps": 3, "avg": False},
                "recompute": {"enable": True},
                "pipeline": {"enable": True, "pp_degree": 2, "accumulate_steps": 4, "vpp_degree": 2},
            }
        )
    )
    assert (settings.precision.level, settings.precision.make_scaler(), settings.precision.master_grad) == (
        "O2",
        None,
        True,
    )
    assert (settings.merge_steps, settings.merge_average) == (3, False)
    plan = settings.plan_for(8)
    assert str(plan.mesh) == "dp2 pp2 sharding2"
    assert (plan.schedule, plan.virtual_stages, plan.num_microbatches, plan.recompute) == ("VPP", 2, 4, "full")
    assert plan.strategy.param_spec(("embed", "ffn"), (8, 8), plan.mesh) != (None, None)
    assert str(settle(None).plan_for(8).mesh) == "dp8"
    assert str(settle(Strategy({"sharding": {"enable": True}})).plan_for(4).mesh) == "sharding4"
    assert settle("auto").is_planned
    assert not settle(None).is_planned
    scaler = settle(Strategy({"amp": {"enable": True, "init_loss_scaling": 8.0}})).precision.make_scaler()
    assert float(scaler.get_loss_scaling()) == 8.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"amp": {"enable": True, "level": "o3"}}, r"amp.level='O3'; give one of 'O0', 'O1', 'O2'"),
        ({"amp": {"enable": True, "dtype": "float8"}}, r"amp.dtype='float8'"),
        ({"sharding": {"enable": True, "stage": 4}}, r"sharding.stage=4; give one of 1, 2, 3"),
        ({"sharding": {"enable": True, "degree": 0}}, r"sharding.degree=0; give a whole number of at least 1"),
        ({"gradient_merge": {"enable": True, "k_steps": 0}}, r"gradient_merge.k_steps=0"),
        ({"pipeline": {"enable": True, "schedule_mode": "2F2B"}}, r"pipeline.schedule_mode='2F2B'"),
        ({"auto_mode": "random"}, r"auto_mode='random'"),
        ({"auto_mode": "full", "sharding": {"enable": True}}, r"lets the planner choose sharding, and so do you"),
    ],
)
def test_values_out_of_range(config, message):
    with pytest.raises(ConfigError, match=message):
        settle(Strategy(config))


def test_degrees_that_do_not_divide_and_other_things_than_a_strategy():
    with pytest.raises(PlacementError, match=r"sharding.degree=3 does not divide 8 devices; make it 2"):
        settle(Strategy({"sharding": {"enable": True, "degree": 3}})).plan_for(8)
    with pytest.raises(PlacementError, match=r"pipeline.pp_degree=3 does not divide 8 devices"):
        settle(Strategy({"pipeline": {"enable": True, "pp_degree": 3}})).plan_for(8)
    with pytest.raises(TypeError, match=r"auto_parallel.Strategy or 'auto', got dict"):
        settle({})
    with pytest.raises(ConfigError, match="strategy='autom'"):
        settle("autom")


def test_an_unknown_section_is_passed_over_with_a_warning():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Strategy({"shardin": {"enable": True}})
    assert "'shardin'" in str(found[0].message)
