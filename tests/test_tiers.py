"""tests/tiers.py: what starts a process is found through helpers; the markers reach the tests."""

import subprocess
import sys

import pytest

from tests import tiers


def command():
    return subprocess.run([sys.executable, "-c", ""])


def through_a_helper():
    return [command() for _ in range(2)]


def with_workers(loader):
    return loader(num_workers=2)


def with_spawn(distributed):
    return distributed.spawn(print)


def alone():
    return sorted([2, 1])


@pytest.mark.parametrize("function", [command, through_a_helper, with_workers, with_spawn])
def test_what_starts_processes_is_found(function):
    assert tiers.starts_processes(function)


def test_what_starts_none_is_not(request):
    assert not tiers.starts_processes(alone)
    assert [m.name for m in request.node.iter_markers() if m.name in ("unit", "compile", "process")] == ["unit"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", range(4))
def test_the_first_of_two_cases_is_not_slow(case, request):
    assert (request.node.get_closest_marker("slow") is not None) == bool(case % 2)
