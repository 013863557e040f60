"""set_flags and get_flags: types, the environment, unknown names."""

import pytest

from polyreme import flags
from polyreme.errors import ConfigError


@pytest.fixture
def flag(monkeypatch):
    made = flags.Flag("FLAGS_of_this_test", 2, "a whole number")
    monkeypatch.setitem(flags.FLAGS, made.name, made)
    return made


def test_a_flag_comes_from_the_environment_until_it_is_set(flag, monkeypatch):
    told = []
    flag.changed.append(lambda: told.append(flag.value))
    assert flags.get_flags(flag.name) == {flag.name: 2}
    monkeypatch.setenv(flag.name, "5")
    assert flags.get_flags([flag.name]) == {flag.name: 5}
    flags.set_flags({flag.name: 7})
    assert flags.get_flags(flag.name) == {flag.name: 7}
    assert told == [7]


@pytest.mark.parametrize(("given", "want"), [(1, True), ("true", True), (False, False), ("0", False)])
def test_bool_flags_take_the_spellings_of_the_environment(given, want):
    assert flags.FLAGS["FLAGS_check_nan_inf"].read(given) is want


def test_what_is_wrong_is_named_and_nothing_changes(flag):
    with pytest.raises(ConfigError, match=r"FLAGS_of_this_test='many': needs a whole number"):
        flags.set_flags({flag.name: "many"})
    with pytest.raises(ConfigError, match=r"FLAGS_check_nan_inf=3: needs True or False"):
        flags.set_flags({"FLAGS_check_nan_inf": 3})
    with pytest.raises(ConfigError, match="did you mean 'FLAGS_check_nan_inf'"):
        flags.set_flags({flag.name: 9, "FLAGS_check_nan_infs": 1})
    with pytest.raises(ConfigError, match="takes a dict"):
        flags.set_flags([flag.name])
    assert flag.value == 2
