"""TaskPlan: rows of tasks over devices, their loader, and the experts that each task may choose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme import nn
from polyreme.distributed import TaskPlan
from polyreme.errors import ConfigError

FOUR = {"face": 512, "car": 256, "food": 128, "goods": 128}


def numbered(**lengths):
    """Datasets whose samples are numbers that no two of them share."""
    return {name: np.arange(n, dtype=np.float32) + 100 * i for i, (name, n) in enumerate(lengths.items())}


def test_a_heavy_task_is_spread_and_light_ones_share():
    tasks = TaskPlan(FOUR, devices=4)
    assert tasks.rows_per_device == 256
    assert [tasks.devices_of(task) for task in FOUR] == [range(2), range(2, 3), range(3, 4), range(3, 4)]
    assert "face   512 rows on devices 0 to 1" in str(tasks)
    assert "goods  128 rows on device 3" in str(tasks)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_devices_of_a_task_are_those_that_hold_its_rows(rows, devices):
    rows[0] += -sum(rows) % devices
    tasks = TaskPlan({str(i): n for i, n in enumerate(rows)}, devices)
    owner = np.repeat(np.arange(len(rows)), rows).reshape(devices, -1)
    for i in range(len(rows)):
        assert list(tasks.devices_of(str(i))) == np.flatnonzero((owner == i).any(1)).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_reads_the_longest_task_once_and_begins_the_others_anew(shuffle):
    tasks = TaskPlan({"a": 3, "b": 1}, devices=2)
    loader = tasks.loader(numbered(a=6, b=4), shuffle=shuffle)
    one, two = ([[t.numpy() for t in batch] for batch in loader] for _ in range(2))
    assert len(one) == len(loader) == 4
    values, owners = (np.stack(part) for part in zip(*one, strict=True))
    np.testing.assert_array_equal(owners, [[0, 0, 0, 1]] * 4)
    a, b = values[:, :3].reshape(2, 6), values[:, 3]
    np.testing.assert_array_equal(np.sort(a), [range(6)] * 2)
    np.testing.assert_array_equal(np.sort(b), np.arange(4) + 100)
    assert np.array_equal(values, np.stack([batch[0] for batch in two])) is not shuffle
    assert (values[:, 3].tolist() == [100, 101, 102, 103]) is not shuffle


def test_processes_read_their_parts_of_the_same_batches():
    tasks = TaskPlan({"a": 5, "b": 3}, devices=4)
    whole = next(iter(tasks.loader(numbered(a=9, b=9))))
    parts = [next(iter(tasks.loader(numbered(a=9, b=9), num_replicas=2, rank=rank))) for rank in range(2)]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([part[i].numpy() for part in parts]), whole[i].numpy())


def test_a_loader_goes_on_where_its_state_was_taken():
    tasks = TaskPlan({"a": 2, "b": 1}, devices=3)
    loader = tasks.loader(numbered(a=6, b=6), generator=3)
    passed = iter(loader)
    next(passed)
    state = loader.state_dict()
    rest = [batch[0].tolist() for batch in passed]
    again = tasks.loader(numbered(a=6, b=6), generator=4)
    again.set_state_dict(state)
    assert [batch[0].tolist() for batch in again] == rest


def test_samples_of_fields_and_names_say_their_task():
    tasks = TaskPlan({"a": 1, "b": 1}, devices=1)
    pairs, named = [(np.float32(1), 2)], [{"x": np.float32(1)}]
    assert [part.tolist() for part in next(iter(tasks.loader({"a": pairs, "b": pairs})))] == [[1, 1], [2, 2], [0, 1]]
    assert next(iter(tasks.loader({"a": named, "b": named})))["task"].tolist() == [0, 1]


def test_rows_choose_among_the_experts_of_their_task():
    tasks = TaskPlan({"a": 5, "b": 3}, devices=1)
    experts = tasks.allowed({"a": [0, 2, 3], "b": [1, 3]}, num_experts=4)
    rows = {name: np.random.default_rng(0).standard_normal((5, 6), np.float32) for name in tasks.rows}
    x, task = next(iter(tasks.loader(rows)))
    moe = nn.MoE(6, 8, 4)
    choices = moe.router(x, experts[task]).choices.numpy()
    assert set(choices[:5].flat) <= {0, 2, 3}
    assert set(choices[5:].flat) == {1, 3}
    assert moe(x, experts[task])[0].shape == [8, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TaskPlan({}, 2), "rows names no task"),
        (lambda: TaskPlan({"a": 0}, 2), "rows of 'a' must be a whole number of at least 1, got 0"),
        (lambda: TaskPlan({"a": 4}, 2.0), "devices must be a whole number of at least 1, got 2.0"),
        (lambda: TaskPlan({"a": 5, "b": 2}, 4), "7 rows of a batch do not divide over 4 devices; 'a' with 6 rows"),
        (lambda: TaskPlan(FOUR, 4).devices_of("fase"), "unknown task 'fase'; did you mean 'face'"),
        (lambda: TaskPlan({"a": 1}, 1).loader({"a": [1], "b": [1]}), "unknown task 'b'"),
        (lambda: TaskPlan({"a": 1, "b": 1}, 1).loader({"a": [1], "b": []}), "no dataset with samples for task 'b'"),
        (lambda: TaskPlan({"a": 4}, 4).loader({"a": [1]}, num_replicas=3, rank=0), "processes must divide the devices"),
        (lambda: TaskPlan([("a", 1)], 1), r"rows names no task, got \[\('a', 1\)\]; give rows of a batch by task"),
        (lambda: TaskPlan({"a": 1}, 1).loader([[1]]), "datasets is a list; give a mapping of tasks to datasets"),
        (lambda: TaskPlan({"a": 1}, 1).allowed({"a": [0]}, 2.5), "num_experts=2.5; give a whole number"),
        (lambda: TaskPlan({"a": 1}, 1).allowed({"a": [0.0]}, 2), r"experts \[0.0\] of task 'a'; give a list of some"),
        (lambda: TaskPlan({"a": 1}, 1).allowed({"a": 1}, 2), "experts 1 of task 'a'; give a list of some of 0 to 1"),
        (lambda: TaskPlan({"a": 1}, 1).allowed({}, 4), r"experts \[\] of task 'a'; give a list of some of 0 to 3"),
        (lambda: TaskPlan({"a": 1}, 1).allowed({"a": [4]}, 4), r"experts \[4\] of task 'a'; give a list of some of"),
    ],
)
def test_refuses_what_does_not_fit(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
