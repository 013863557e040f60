"""DistributedStrategy: its fields are those of PaddlePaddle 3.3.1, each is honoured, harmless or refused, and it
survives being saved.

strategy_fields.txt lists the fields, types and defaults as that release has them.
"""

import copy
import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.distributed.fleet.base import prototxt
from polyreme.distributed.fleet.base.distributed_strategy import DistributedStrategy
from polyreme.distributed.fleet.base.job import resolve
from polyreme.distributed.fleet.base.strategy_fields import FIELDS, GATES, OWN
from polyreme.distributed.settings import HARMLESS, HONOURED, REFUSED, walk
from polyreme.errors import ConfigError, PlacementError, StrategyError
from polyreme.mesh import Plan
from polyreme.static import BuildStrategy

ROOT = Path(__file__).parents[3]
LISTED = Path(__file__).with_name("strategy_fields.txt").read_text().splitlines()
ALL = dict(walk(FIELDS))
NOT_IN_PROTO = {*OWN, "hybrid_configs.order", "hybrid_configs.mp_configs.sync_param_name"}
WITHOUT_FIELDS = {"trainer_desc_configs", "downpour_table_param"}
"""Messages whose fields the list leaves out."""


def listed():
    """Dotted name -> type and default as text, for every field of the list that is no group."""
    options, path = {}, []
    for line in LISTED:
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, rest = line.strip().partition(":")
        path = [*path[:depth], name]
        if rest.strip() != "msg" and ".".join(path[:-1]) != "recompute_configs.refined_ops_patterns":
            options[".".join(path)] = rest.strip()
    return options


def test_the_fields_are_the_listed_ones():
    ours = {n for n in ALL if n not in NOT_IN_PROTO and n.split(".")[0] not in WITHOUT_FIELDS}
    assert ours == {n for n in listed() if n.split(".")[0] not in WITHOUT_FIELDS}
    assert set(FIELDS) >= WITHOUT_FIELDS


@pytest.mark.parametrize("name", [n for n in listed() if n not in WITHOUT_FIELDS])
def test_defaults_are_the_listed_ones(name):
    kind, _, default = listed()[name].partition(" = ")
    field = ALL[name]
    if kind.startswith("repeated"):
        assert field.default == []
    elif kind == "float":
        assert np.float32(field.default) == np.float32(default)
        assert type(field.default) is float
    else:
        assert str(field.default) == default
        assert type(field.default).__name__ == {"int32": "int", "string": "str", "enum": "str"}.get(kind, kind)


def test_every_field_is_in_one_class_and_says_why():
    for name, field in ALL.items():
        assert field.kind in (HONOURED, HARMLESS, REFUSED), name
        assert field.note, name


def test_the_document_has_the_table():
    spec = importlib.util.spec_from_file_location("write_fleet_table", ROOT / "tools" / "write_fleet_table.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.table() in (ROOT / "docs" / "fleet.md").read_text(), "run: python tools/write_fleet_table.py"
    assert all(f"`{name.split('.')[-1]}`" in tool.table() for name in ALL)


SAMPLES = {
    "hybrid_configs.order": ["mp", "dp"],
    "hybrid_configs.sep_configs.attention": "ring",
    "hybrid_configs.sep_configs.order": "zigzag",
    "pipeline_configs.schedule_mode": "ZBH1",
    "amp_configs.decr_ratio": 0.5,
    "amp_configs.custom_white_list": ["softmax"],
    "amp_configs.custom_black_list": ["matmul"],
}
AROUND = {
    # what else must be set for a field to have something to act on
    "sharding": {"sharding_configs": {"sharding_degree": 2}},
    "gradient_merge": {"gradient_merge_configs": {"k_steps": 2}},
    "pipeline_configs.schedule_mode": {"hybrid_configs": {"pp_degree": 2}},
    "hybrid_configs.pp_configs.use_dualpipev": {"hybrid_configs": {"pp_degree": 2}},
    "hybrid_configs.mp_configs.sequence_parallel": {"hybrid_configs": {"mp_degree": 2}},
    "hybrid_configs.sharding_configs.stage": {"hybrid_configs": {"sharding_degree": 2}},
    "hybrid_configs.sep_configs.order": {"hybrid_configs": {"sep_degree": 2}},
    "hybrid_configs.sep_configs.ulysses_degree": {
        "hybrid_configs": {"sep_degree": 4, "sep_configs": {"attention": "usp"}}
    },
    **{
        f"sharding_configs.{name}": {"sharding_configs": {"sharding_degree": 2}}
        for name in ("stage", "mp_degree", "pp_degree")
    },
}
CHECKS = (
    "pipeline",
    "tensor_parallel",
    "hybrid_configs.dp_degree",
    "hybrid_configs.moe_sharding_degree",
    "sharding_configs.dp_degree",
)
"""Honoured, but they can only agree with the rest or be refused: the tests below show that they are read."""


def other(field):
    """A value that is not the default."""
    if isinstance(field.default, list):
        return [{str: "x", int: 1, float: 0.5, dict: {"a": ["b"]}}[field.item]]
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, str):
        return field.default + "x"
    return 2 if field.default != 2 else 4


def setting(name, value):
    """A strategy with this one setting, the switch of its group on, and what it needs around it."""
    strategy = DistributedStrategy()
    for group, values in AROUND.get(name, {}).items():
        setattr(strategy, group, values)
    *groups, last = name.split(".")
    if groups and groups[0] in GATES:
        setattr(strategy, GATES[groups[0]], True)
    target = strategy
    for group in groups:
        target = target[group] if target is not strategy else getattr(strategy, group)
    if value is not None:
        target[last] = value if target is not strategy else None
    return strategy


def with_and_without(name):
    value = SAMPLES.get(name, other(ALL[name]))
    if "." in name:
        return setting(name, value), setting(name, None)
    plain = setting(name, None)
    changed = copy.deepcopy(plain)
    setattr(changed, name, value)
    return changed, plain


@pytest.mark.parametrize("name", [n for n, f in ALL.items() if f.kind == HARMLESS])
def test_a_harmless_field_changes_nothing(name):
    changed, plain = with_and_without(name)
    assert name in changed.changed()
    assert resolve(changed, 8) == resolve(plain, 8)


@pytest.mark.parametrize("name", [n for n, f in ALL.items() if f.kind == REFUSED])
def test_a_refused_field_is_named_with_what_to_do_instead(name):
    changed, plain = with_and_without(name)
    resolve(plain, 8)
    with pytest.raises(ConfigError, match=rf"{name}=.*: .*{ALL[name].note[:20]}"):
        resolve(changed, 8)


@pytest.mark.parametrize("name", [n for n, f in ALL.items() if f.kind == HONOURED and n not in CHECKS])
def test_an_honoured_field_changes_the_job(name):
    changed, plain = with_and_without(name)
    assert resolve(changed, 8) != resolve(plain, 8)


@pytest.mark.parametrize(("switch", "degree"), [("pipeline", "pp_degree"), ("tensor_parallel", "mp_degree")])
def test_a_switch_wants_its_degree(switch, degree):
    strategy = DistributedStrategy()
    setattr(strategy, switch, True)
    with pytest.raises(ConfigError, match=f"{switch} is on but {degree} is 1"):
        resolve(strategy, 8)
    strategy.hybrid_configs = {degree: 2}
    resolve(strategy, 8)


def hybrid(**values):
    strategy = DistributedStrategy()
    strategy.hybrid_configs = values
    return strategy


@pytest.mark.parametrize(
    ("degrees", "mesh"),
    [
        ({}, "dp8"),
        ({"mp_degree": 2}, "dp4 mp2"),
        ({"sharding_degree": 2, "sep_degree": 2}, "dp2 sharding2 sep2"),
        ({"dp_degree": 2, "pp_degree": 2, "mp_degree": 2}, "dp2 pp2 mp2"),
        ({"ep_degree": 4}, "dp2 ep4"),
        ({"ep_degree": 2, "sharding_degree": 4, "moe_sharding_degree": 4}, "sharding4 ep2"),
        ({"mp_degree": 2, "order": ["mp", "dp"]}, "mp2 dp4 order=mp,dp,pp,sharding,sep,ep"),
    ],
)
def test_degrees_make_the_mesh(degrees, mesh):
    plan = resolve(hybrid(**degrees), 8).plan
    assert str(plan.mesh) == mesh


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"mp_degree": 3}, r"'dp' cannot be sized.*mp3.*nearest that use 8"),
        ({"dp_degree": 3, "mp_degree": 2}, r"dp3 mp2 needs 6 devices, 8 given; the nearest that use 8: 'dp4 mp2'"),
        ({"mp_degree": 0}, r"'mp' has degree 0"),
        ({"dp_degree": -2}, r"'dp' has degree -2"),
        ({"sharding_degree": 2, "moe_sharding_degree": 4}, "moe_sharding_degree=4, but state is split in 2 parts"),
    ],
)
def test_degrees_that_do_not_fit_name_the_nearest(degrees, match):
    with pytest.raises((PlacementError, ConfigError), match=match):
        resolve(hybrid(**degrees), 8)


def test_the_degree_of_static_data_parallelism_is_checked():
    strategy = DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": 2, "dp_degree": 2}
    with pytest.raises(PlacementError, match=r"dp2 sharding2 needs 4 devices, 8 given"):
        resolve(strategy, 8)


def test_two_settings_that_contradict_each_other_are_refused():
    strategy = hybrid(sharding_degree=4)
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": 2}
    with pytest.raises(ConfigError, match=r"sharding_configs.sharding_degree=2 contradicts hybrid_configs"):
        resolve(strategy, 8)
    strategy = hybrid(sharding_degree=4, sharding_configs={"stage": 3})
    strategy.sharding = True
    strategy.sharding_configs = {"stage": 2}
    with pytest.raises(ConfigError, match=r"sharding_configs.stage=2 contradicts .*stage=3"):
        resolve(strategy, 8)
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"use_pure_fp16": True, "use_pure_bf16": True}
    with pytest.raises(ConfigError, match="use_pure_fp16=True contradicts"):
        resolve(strategy, 8)


def test_values_out_of_range_are_refused():
    strategy = DistributedStrategy()
    strategy.pipeline_configs = {"schedule_mode": "1F2B"}
    with pytest.raises(ConfigError, match=r"schedule_mode='1F2B'; did you mean '1F1B'"):
        resolve(strategy, 8)
    strategy = DistributedStrategy()
    strategy.pipeline_configs = {"accumulate_steps": 0}
    with pytest.raises(ConfigError, match=r"accumulate_steps=0; give a whole number"):
        resolve(strategy, 8)


def test_old_static_settings_make_the_same_plan_as_hybrid_ones():
    old = DistributedStrategy()
    old.sharding = True
    old.sharding_configs = {"sharding_degree": 4, "stage": 2, "dp_degree": 2, "optimize_offload": True}
    new = hybrid(sharding_degree=4, dp_degree=2, sharding_configs={"stage": 2, "offload": True})
    assert resolve(old, 8) == resolve(new, 8)


def test_strategy_to_plan_to_yaml_and_back():
    strategy = hybrid(dp_degree=2, pp_degree=2, mp_degree=2, mp_configs={"sequence_parallel": True})
    strategy.pipeline_configs = {"accumulate_steps": 4, "schedule_mode": "ZBVPP"}
    strategy.recompute = True
    plan = resolve(strategy, 8).plan
    assert Plan.from_yaml(plan.to_yaml()) == plan
    want = Plan.from_degrees(
        dp=2, pp=2, mp=2, sequence_parallel=True, schedule="ZBVPP", num_microbatches=4, recompute="full"
    )
    assert plan == want


# setting and reading


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("ampp", True, r"no setting 'ampp'; did you mean 'amp'"),
        ("amp", 1, r"amp is True or False, got 1 of type int"),
        ("fuse_grad_size_in_MB", True, r"fuse_grad_size_in_MB is a whole number, got True"),
        ("fuse_grad_size_in_MB", 3.5, r"is a whole number, got 3.5 of type float"),
        ("last_comm_group_size_MB", "1", r"is a number, got '1' of type str"),
        ("amp_configs", {"init_los_scaling": 1.0}, r"amp_configs has no setting .*did you mean 'init_loss_scaling'"),
        ("amp_configs", {"custom_white_list": "matmul"}, r"custom_white_list is a list of a text, got 'matmul'"),
        ("hybrid_configs", {"order": []}, r"hybrid_configs.order is a list of at least one name, got \[\]"),
        ("amp_configs", 5, r"amp_configs is a group of settings, got 5; give a dict"),
        ("hybrid_configs", {"pp_configs": {"use_dualpipe": True}}, r"hybrid_configs.pp_configs has no setting"),
        ("hybrid_configs", {"dp_degree": "2"}, r"hybrid_configs.dp_degree is a whole number, got '2'"),
    ],
)
def test_a_wrong_name_or_type_is_a_type_error_that_helps(name, value, match):
    strategy = DistributedStrategy()
    with pytest.raises(StrategyError, match=match) as caught:
        setattr(strategy, name, value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ConfigError)


def test_reading_an_unknown_name_is_an_attribute_or_key_error():
    strategy = DistributedStrategy()
    with pytest.raises(AttributeError, match="did you mean 'tensor_parallel'"):
        _ = strategy.tensor_paralel
    with pytest.raises(AttributeError, match="pp_configs has no setting 'zz'"):
        _ = strategy.hybrid_configs["pp_configs"].zz
    with pytest.raises(KeyError):
        _ = strategy.hybrid_configs["zz"]
    with pytest.raises(StrategyError, match="cannot be removed"):
        del strategy.amp


def test_a_group_keeps_what_is_not_given_and_can_be_changed_in_place():
    strategy = hybrid(dp_degree=2, pp_configs={"delay_scale_loss": True})
    strategy.hybrid_configs = {"mp_degree": 4, "pp_configs": {"dp_comm_overlap": True}}
    strategy.hybrid_configs["sep_degree"] = 1
    strategy.hybrid_configs["pp_configs"].release_gradients = True
    assert (strategy.hybrid_configs["dp_degree"], strategy.hybrid_configs.mp_degree) == (2, 4)
    assert dict(strategy.hybrid_configs["pp_configs"])["delay_scale_loss"] is True
    assert strategy.hybrid_parallel_order == ["dp", "pp", "sharding", "sep", "cp", "mp"]
    assert set(strategy.given()["hybrid_configs"]) == {"dp_degree", "mp_degree", "sep_degree", "pp_configs"}


def test_a_list_can_be_added_to_in_place():
    strategy = DistributedStrategy()
    strategy.amp_configs["custom_white_list"].append("matmul")
    assert strategy.changed() == {"amp_configs.custom_white_list": ["matmul"]}
    assert DistributedStrategy().changed() == {}


def test_a_copy_is_apart():
    strategy = hybrid(dp_degree=2, order=["mp", "dp"])
    for other_one in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other_one == strategy
        other_one.hybrid_configs["order"].append("pp")
        assert other_one != strategy


def test_the_table_shows_every_setting():
    strategy = hybrid(dp_degree=2)
    text = repr(strategy)
    names = {n.split(".", 1)[1] if "." in n else n for n in ALL if "nccl_config" not in n}
    assert all(f"| {name} " in text for name in names)
    assert "amp_configs (not in force: amp is off)" in text
    assert {len(line) for line in text.splitlines()} == {100}


# saved


def values_of(field):
    texts = st.text(st.characters(codec="utf-8"), max_size=6)
    kinds = {
        bool: st.booleans(),
        int: st.integers(-(2**31), 2**31 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: texts,
        dict: st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), st.lists(texts, min_size=1), max_size=2),
    }
    if isinstance(field.default, list):
        return st.lists(kinds[field.item], min_size=len(field.default) > 0, max_size=3)
    return kinds[type(field.default)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_saved_and_loaded_is_the_same(tmp_path_factory, data):
    names = data.draw(st.lists(st.sampled_from([n for n in ALL if n != "mode"]), max_size=6, unique=True))
    strategy = DistributedStrategy()
    for name in names:
        *groups, last = name.split(".")
        target = {}
        nested = target
        for group in [*groups[1:]]:
            nested[group] = nested = {}
        value = data.draw(values_of(ALL[name]))
        nested[last] = value
        setattr(strategy, groups[0] if groups else last, target if groups else value)
    path = tmp_path_factory.mktemp("strategy") / "strategy.prototxt"
    strategy.save_to_prototxt(path)
    loaded = DistributedStrategy()
    loaded.load_from_prototxt(path)
    assert loaded == strategy


SAVED_ELSEWHERE = r"""
recompute: true  # as another program's text format may look
amp_configs { decr_ratio: 0.5f, use_pure_bf16: 1; custom_white_list: ["a", 'b'] custom_white_list: "c" "d" }
fs_client_param < uri: "a\"b\nc\303\251\x41" >
hybrid_configs: { dp_degree: -1 mp_degree: 0x2 }
mode: COLLECTIVE
"""


def test_any_text_format_is_read(tmp_path):
    path = tmp_path / "strategy.prototxt"
    path.write_text(SAVED_ELSEWHERE)
    strategy = hybrid(sep_degree=2)
    strategy.load_from_prototxt(path)
    assert strategy.given() == {
        "mode": "COLLECTIVE",
        "recompute": True,
        "amp_configs": {"decr_ratio": 0.5, "use_pure_bf16": True, "custom_white_list": ["a", "b", "cd"]},
        "fs_client_param": {"uri": 'a"b\nc\u00e9A'},
        "hybrid_configs": {"dp_degree": -1, "mp_degree": 2, "sep_degree": 2},
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("amp: true\nzz: 3\n", r"no setting 'zz'"),
        ("amp: maybe\n", r"amp cannot be 'maybe'; give true or false"),
        ('amp: "true"\n', r"amp cannot be 'true'; give true or false"),
        ("amp\n", r"line \d: got the end where : is due"),
        ("amp_configs {\n  incr_ratio: 2\n", r"line \d: got the end where word is due"),
        ("amp_configs: 3\n", r"amp_configs is a group of settings, got '3'"),
        ("amp: true\n@", r"line 2: cannot read '@'"),
    ],
)
def test_a_file_that_is_not_a_strategy_is_refused_and_changes_nothing(tmp_path, text, match):
    path = tmp_path / "strategy.prototxt"
    path.write_text("lamb: true\n" + text if "line 2" not in match else text)
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match=match):
        strategy.load_from_prototxt(path)
    assert strategy.given() == {}


def test_text_is_written_as_protobuf_writes_it():
    text = prototxt.write({"amp": True, "amp_configs": {"decr_ratio": 0.5, "custom_white_list": ["a", 'b"\n']}})
    assert text == (
        'amp: true\namp_configs {\n  decr_ratio: 0.5\n  custom_white_list: "a"\n  custom_white_list: "b\\"\\n"\n}\n'
    )


def test_a_build_strategy_is_taken_for_the_settings_that_both_have():
    build = BuildStrategy()
    build.fuse_bn_act_ops = build.enable_inplace = build.fuse_adamw = True
    build.reduce_strategy = BuildStrategy.ReduceStrategy.Reduce
    strategy = DistributedStrategy()
    strategy.build_strategy = build
    assert strategy.given() == {
        "build_strategy": {"fuse_bn_act_ops": True, "enable_inplace": True, "reduce_strategy": 1}
    }
    copied = DistributedStrategy()
    copied.build_strategy = strategy.build_strategy
    assert copied == strategy
