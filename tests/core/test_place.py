"""Places: names of devices, and which are the same."""

import polyreme as paddle
from polyreme.core.devices.place import as_place


def test_places_of_one_device_are_equal_whatever_names_them():
    places = [paddle.CPUPlace(), as_place("cpu"), paddle.ones([1]).place]
    assert all(a == b for a in places for b in places)
    assert len(set(places)) == 1
    assert paddle.CPUPlace() != paddle.CUDAPlace(0)
    assert as_place("cpu:1") != paddle.CPUPlace()
    assert paddle.CustomPlace("gpu", 0) == paddle.CUDAPlace(0)
    assert paddle.CPUPlace() != "cpu"
