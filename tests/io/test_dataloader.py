"""DataLoader: batches, order, exact resume, settings; in this process and with workers."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme import io
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError, DataError
from tests.io import sources

both = pytest.mark.parametrize("workers", [0, 2])


def ids(loader, count=None):
    batches = []
    for batch in loader:
        batches.append(batch[0].numpy().tolist())
        if len(batches) == count:
            break
    return batches


@both
@pytest.mark.parametrize("shared", [True, False])
def test_batches_are_tensors_in_order(workers, shared):
    loader = io.DataLoader(sources.Rows(10), batch_size=4, num_workers=workers, use_shared_memory=shared)
    assert len(loader) == 3
    batches = list(loader())
    assert all(isinstance(field, Tensor) for batch in batches for field in batch)
    assert [b[0].numpy().tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for index, rows in batches:
        np.testing.assert_array_equal(rows.numpy(), np.repeat(index.numpy()[:, None], 3, axis=1).astype("float32"))


def test_batches_kept_by_the_user_are_not_overwritten_by_later_ones():
    kept = list(io.DataLoader(sources.Growing(60), batch_size=1, num_workers=2))
    for i, batch in enumerate(kept):
        np.testing.assert_array_equal(batch.numpy(), [np.full(1 + (i * 7919) % 5000, i)])


def test_workers_do_not_import_jax_and_persist_when_asked():
    loader = io.DataLoader(sources.Modules(6), num_workers=2, persistent_workers=True)
    epochs = [[(int(jax), int(pid)) for jax, pid in loader] for _ in range(2)]
    assert all(jax == 0 for epoch in epochs for jax, _ in epoch)
    assert len({pid for epoch in epochs for _, pid in epoch}) == 2
    assert io.get_worker_info() is None


def test_a_persistent_loader_drops_what_an_abandoned_epoch_left():
    loader = io.DataLoader(sources.Rows(12), batch_size=2, num_workers=2, persistent_workers=True)
    first = iter(loader)
    next(first)
    assert ids(loader) == ids(io.DataLoader(sources.Rows(12), batch_size=2))
    with pytest.raises(DataError, match="a newer iteration over the same persistent workers"):
        next(first)


@both
def test_two_iterations_of_one_loader_at_once(workers):
    loader = io.DataLoader(sources.Rows(4), num_workers=workers)
    assert [(int(a[0]), int(b[0])) for a, b in zip(loader, loader, strict=True)] == [(i, i) for i in range(4)]


@both
def test_shuffling_differs_by_epoch_and_repeats_by_seed(workers):
    def epochs():
        order = io.BatchSampler(sampler=io.RandomSampler(range(40), generator=5), batch_size=8)
        loader = io.DataLoader(sources.Rows(40), batch_sampler=order, num_workers=workers)
        return [ids(loader), ids(loader)]

    first, second = epochs()
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(40))
    assert epochs() == [first, second]


def shuffled(n, size, seed, workers, **more):
    order = io.BatchSampler(sampler=io.RandomSampler(range(n), generator=seed), batch_size=size)
    return io.DataLoader(sources.Rows(n), batch_sampler=order, num_workers=workers, **more)


def test_resume_across_worker_counts_repeats_and_loses_nothing():
    whole = shuffled(50, 4, 3, 0)
    expected = ids(whole) + ids(whole)
    log, state = [], None
    for workers, steps in ((0, 5), (2, 6), (1, 9), (2, 6)):
        loader = shuffled(50, 4, 99, workers)  # another seed: the state brings its own
        if state:
            loader.set_state_dict(state)
        while steps:
            for batch in loader:
                log.append(batch[0].numpy().tolist())
                steps -= 1
                if not steps:
                    break
        if state is None:
            assert loader.state_dict()["seed"] == 99
            log.clear()
            loader = shuffled(50, 4, 3, workers)
            log += ids(loader, 5)
        state = loader.state_dict()
    assert log == expected
    assert (state["epoch"], state["batches"]) == (1, 13)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 7), st.integers(0, 2**40), st.data())
def test_resume_anywhere_continues_the_same_order(n, size, seed, data):
    whole = shuffled(n, size, seed, 0)
    expected = [ids(whole), ids(whole), ids(whole)]
    epoch = data.draw(st.integers(0, 1))
    stop = data.draw(st.integers(1, len(whole)))
    part = shuffled(n, size, seed, 0)
    for _ in range(epoch):
        ids(part)
    assert ids(part, stop) == expected[epoch][:stop]
    rest = shuffled(n, size, 0, 0)
    rest.set_state_dict(part.state_dict())
    assert rest.epoch == epoch
    assert ids(rest) == expected[epoch][stop:]
    assert ids(rest) == expected[epoch + 1]


@pytest.mark.parametrize("before", [0, 1, 4])
def test_state_between_epochs_and_before_the_first(before):
    loader = shuffled(8, 2, 1, 0)
    for _ in range(before):
        ids(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (before, 0)
    again = shuffled(8, 2, 7, 0)
    again.set_state_dict(state)
    assert ids(again) == ids(loader)


def test_state_after_a_failure_is_that_of_the_last_delivered_batch():
    loader = io.DataLoader(sources.Faulty(10, 6, "raises"), batch_size=2, num_workers=2)
    with pytest.raises(DataError, match="reading sample 6"):
        ids(loader)
    assert loader.state_dict()["batches"] == 3
    fixed = io.DataLoader(sources.Rows(10), batch_size=2)
    fixed.set_state_dict(loader.state_dict())
    assert ids(fixed) == [[6, 7], [8, 9]]


@both
def test_set_epoch_of_the_sampler_is_obeyed(workers):
    order = io.DistributedBatchSampler(range(20), 3, 2, 1, shuffle=True)
    loader = io.DataLoader(sources.Rows(20), batch_sampler=order, num_workers=workers)
    first, second = ids(loader), ids(loader)
    order.set_epoch(0)
    assert loader.state_dict()["epoch"] == 0
    assert first != second
    assert ids(loader) == first


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_streams_are_shared_and_resume_by_skipping(workers):
    def loader():
        return io.DataLoader(sources.Count(23), batch_size=3, num_workers=workers)

    whole = [batch.numpy().tolist() for batch in loader()]
    assert sorted(chain(*whole)) == list(range(23))
    for stop in range(1, len(whole)):
        part = loader()
        head = [batch.numpy().tolist() for batch, _ in zip(part, range(stop), strict=False)]
        state = part.state_dict() | {"batches": stop}  # zip has taken one more than it gave
        rest = loader()
        rest.set_state_dict(state)
        assert head + [batch.numpy().tolist() for batch in rest] == whole
    with pytest.raises(ConfigError, match="stream_readers="):
        io.DataLoader(sources.Count(23), batch_size=3, num_workers=workers + 3).set_state_dict(state)


@both
def test_stream_drop_last_and_bare_samples(workers):
    dropped = io.DataLoader(sources.Count(5), batch_size=2, drop_last=True, num_workers=min(workers, 1))
    assert [b.numpy().tolist() for b in dropped] == [[0, 1], [2, 3]]
    assert sorted(io.DataLoader(sources.Count(5), batch_size=None, num_workers=workers)) == [0, 1, 2, 3, 4]
    bare = io.DataLoader(sources.Rows(3), batch_size=None, num_workers=workers)
    assert [(index, rows.shape) for index, rows in bare] == [(i, [3]) for i in range(3)]


def test_augmentation_does_not_depend_on_the_workers():
    def noise(workers, state=None):
        loader = shuffled(12, 2, 4, workers)
        loader.dataset = sources.Augmented(12)
        if state:
            loader.set_state_dict(state)
        return [batch[1].numpy().tolist() for batch in loader]

    assert noise(1) == noise(2)
    state = shuffled(12, 2, 4, 2).state_dict() | {"batches": 2}
    assert noise(1, state) == noise(2)[2:]
    assert len({x for batch in noise(2) for x in batch}) == 12


def test_worker_init_fn_seeds_are_kept():
    loader = io.DataLoader(sources.Augmented(2), num_workers=1, worker_init_fn=sources.init_seeds)
    expected = np.random.RandomState(0).random_sample(2)
    assert [float(noise) for _, noise in loader] == expected.tolist()


def test_datasets_share_memory_and_mapped_files_travel_by_name(tmp_path):
    array = np.arange(12.0).reshape(6, 2)
    [(row, kind, writable), *_] = io.DataLoader(sources.Held(array), batch_size=6, num_workers=1)
    np.testing.assert_array_equal(row.numpy(), array)
    assert (kind[0], bool(writable[0])) == ("ndarray", False)
    path = tmp_path / "tokens.bin"
    array.tofile(path)
    mapped = np.memmap(path, "float64", "r").reshape(6, 2)[2:]
    [(row, kind, _)] = io.DataLoader(sources.Held(mapped), batch_size=4, num_workers=1)
    np.testing.assert_array_equal(row.numpy(), array[2:])
    assert kind[0] == "memmap"


def test_feed_list_and_places():
    named = io.DataLoader(sources.Rows(2), feed_list=["x", "y"], return_list=False, places=["cpu"])
    [feed] = next(iter(named))
    assert set(feed) == {"x", "y"}
    with pytest.raises(ConfigError, match="feed_list names 3 fields"):
        next(iter(io.DataLoader(sources.Rows(2), feed_list=["x", "y", "z"])))
    with pytest.raises(ConfigError, match="places has 2 entries"):
        io.DataLoader(sources.Rows(2), places=["cpu", "cpu"])


def test_objects_that_are_not_arrays_come_through():
    loader = io.DataLoader(sources.Rows(2), batch_size=2, collate_fn=sources.odd_collate, num_workers=1)
    [batch] = list(loader)
    assert batch["ids"] == {0, 1}
    assert batch["names"].tolist() == [None, "x"]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"prefetch_factor": 0}, "prefetch_factor must be"),
        ({"reader_buffer_size": 0}, "reader_buffer_size must be"),
        ({"timeout": -1}, "timeout is -1 s"),
        ({"persistent_workers": True}, "persistent_workers=True needs"),
        ({"batch_size": None, "drop_last": True}, "drop_last=True needs a batch_size"),
        ({"batch_sampler": [[0]], "shuffle": True}, "have no effect on a given batch_sampler"),
    ],
)
def test_settings_that_cannot_be_honoured(settings, match):
    with pytest.raises(ConfigError, match=match):
        io.DataLoader(sources.Rows(4), **settings)


def test_settings_a_stream_cannot_have():
    with pytest.raises(ConfigError, match="shuffle=True cannot reorder"):
        io.DataLoader(sources.Count(4), shuffle=True)
    with pytest.raises(ConfigError, match="a batch_sampler cannot reorder"):
        io.DataLoader(sources.Count(4), batch_sampler=[[0]])
    with pytest.raises(TypeError, match="has no length"):
        len(io.DataLoader(sources.Count(4)))


@both
def test_never_zero_steps_in_silence(workers):
    with pytest.raises(DataError, match="0 samples of Rows make no batch"):
        io.DataLoader(sources.Rows(0), num_workers=workers)
    with pytest.raises(DataError, match="3 samples of Rows make no batch with batch_size=4, drop_last=True"):
        io.DataLoader(sources.Rows(3), batch_size=4, drop_last=True, num_workers=workers)
    with pytest.raises(DataError, match="3 samples of Rows make no batch"):
        list(io.DataLoader(sources.Rows(3), batch_sampler=[], num_workers=workers))
    with pytest.raises(DataError, match="the stream of Count gave no batch"):
        list(io.DataLoader(sources.Count(0), num_workers=workers))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 0}, "version 0"),
        ({"samples": 9}, "samples=9, this loader has 8"),
        ({"batch_size": 3}, "batch_size=3"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, match):
    loader = shuffled(8, 2, 1, 0)
    with pytest.raises(ConfigError, match=match):
        loader.set_state_dict(loader.state_dict() | change)


def test_set_state_ends_the_running_iteration():
    loader = shuffled(8, 2, 1, 0)
    running = iter(loader)
    next(running)
    loader.set_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="set_state_dict has moved"):
        next(running)


def test_one_slow_worker_does_not_set_the_pace():
    loader = io.DataLoader(sources.SlowInOneWorker(), batch_size=None, num_workers=3)
    seen = np.array([sample.numpy() for sample in loader])
    assert seen[:, 0].tolist() == list(range(36))
    assert 1 <= (seen[:, 1] == 0).sum() < 10  # in turns it reads 12 of them


def test_workers_that_may_differ_take_turns():
    loader = io.DataLoader(
        sources.SlowInOneWorker(), batch_size=None, num_workers=3, worker_init_fn=lambda worker: None
    )
    workers = [int(sample.numpy()[1]) for sample, _ in zip(loader, range(9), strict=False)]
    assert workers == [0, 1, 2] * 3
