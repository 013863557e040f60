"""Datasets of text files: a click-through model trained from them, and lines that are not as they should be."""

import random
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
from polyreme.errors import ConfigError, DataError, DTypeError


@pytest.fixture
def files(tmp_path):
    """Two files of lines of ids, two numbers and a label: 1 if an id is below 5."""
    draws = np.random.RandomState(0)
    paths = []
    for name in ("part-0", "part-1"):
        lines = []
        for _ in range(20):
            ids = draws.randint(0, 10, draws.randint(1, 4))
            lines.append(f"{len(ids)} {' '.join(map(str, ids))} 2 0.5 -1.5 1 {int((ids < 5).any())}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        paths.append(str(tmp_path / name))
    return paths


def variables(fluid):
    ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
    return ids, fluid.layers.data("dense", [2]), fluid.layers.data("click", [1], dtype="int64")


def test_a_click_model_learns_from_files(script, files, capsys):
    fluid = script
    ids, dense, click = variables(fluid)
    pooled = fluid.layers.sequence_pool(fluid.layers.embedding(ids, [10, 4], is_sparse=True), "sum")
    predicted = fluid.layers.fc(fluid.layers.concat([pooled, dense], axis=1), 2, act="softmax")
    loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, click))
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.Adagrad(0.3).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())

    dataset = fluid.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_use_var([ids, dense, click])
    dataset.set_batch_size(10)
    dataset.set_thread(2)
    dataset.set_filelist(files)
    dataset.load_into_memory()
    assert dataset.get_memory_data_size() == 40
    dataset.local_shuffle()
    seen = []

    class Handler(fluid.executor.FetchHandler):
        def handler(self, res_dict):
            seen.append(res_dict)

    for period in (0, 0, 0, 3600):
        handler = Handler({"cost": loss, "words": ids}, period_secs=period)
        exe.train_from_dataset(
            fluid.default_main_program(),
            dataset,
            fetch_list=[loss],
            fetch_info=["loss"],
            print_period=4,
            fetch_handler=handler,
        )
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch 4: loss: ")]
    values = [float(line.partition("loss: ")[2].strip("[]")) for line in printed]
    assert len(values) == 4
    assert values[-1] < 0.7 * values[0]
    assert len(seen) == 3 * 4  # minibatches of three epochs; in the fourth no hour is over
    np.testing.assert_allclose([s["cost"].item() for s in seen[3::4]], values[:3], rtol=1e-6)  # as it is printed
    assert len(np.asarray(seen[0]["words"])) == sum(seen[0]["words"].recursive_sequence_lengths()[0])
    weight = np.array(fluid.global_scope().find_var("fc_0.w_0").get_tensor())
    exe.infer_from_dataset(test_program, dataset, fetch_list=[loss], print_period=1)
    np.testing.assert_array_equal(np.array(fluid.global_scope().find_var("fc_0.w_0").get_tensor()), weight)
    assert f"batch 3: {loss.name}: " in capsys.readouterr().out


def test_minibatches_are_the_lines_in_order(script, files):
    fluid = script
    ids, dense, click = variables(fluid)
    dataset = fluid.DatasetFactory().create_dataset()
    dataset.set_use_var([ids, dense, click])
    dataset.set_batch_size(16)
    dataset.set_filelist(files)
    dataset.set_pipe_command("head -n 10")
    first, rest = dataset.feeds()
    words = [line.split() for f in files for line in Path(f).read_text().splitlines()[:10]]
    assert first["ids"].recursive_sequence_lengths() == [[int(w[0]) for w in words[:16]]]
    assert np.array(first["ids"]).shape == (sum(int(w[0]) for w in words[:16]), 1)
    assert first["dense"].tolist() == [[0.5, -1.5]] * 16
    assert rest["click"].tolist() == [[int(w[-1])] for w in words[16:]]
    assert (first["dense"].dtype, rest["click"].dtype) == ("float32", "int64")
    loader = fluid.io.DataLoader.from_dataset(dataset, fluid.cpu_places(1), drop_last=True)
    assert [[sorted(feed) for feed in feeds] for feeds in loader()] == [[["click", "dense", "ids"]]]


def test_a_shuffle_keeps_every_line(script, files):
    dataset = script.InMemoryDataset()
    dataset.set_use_var(variables(script))
    dataset.set_filelist(files)
    with pytest.raises(DataError, match="call load_into_memory"):
        dataset.global_shuffle()
    dataset.preload_into_memory()
    dataset.wait_preload_done()
    before = [feed["ids"] for feed in dataset.feeds()]
    random.seed(0)
    dataset.global_shuffle()
    after = [feed["ids"] for feed in dataset.feeds()]
    assert [np.array(v).tolist() for v in before] != [np.array(v).tolist() for v in after]
    assert sorted(np.array(v).tolist() for v in before) == sorted(np.array(v).tolist() for v in after)
    dataset.release_memory()
    assert dataset.get_shuffle_data_size() == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2 1 2 2 0.5 0.5", r"line 2: slot click is not a number and that many values"),
        ("2 1 x 2 0.5 0.5 1 0", r"line 2: slot ids is not"),
        ("0 2 0.5 0.5 1 0", "slot ids says 0 values, has 0; needs at least 1"),
        ("1 1 3 0.5 0.5 0.5 1 0", "slot dense has 3 values, its shape .* takes 2"),
        ("1 1 2 0.5 0.5 1 0 7", "1 words follow the 3 slots"),
    ],
)
def test_a_bad_line_is_named(script, tmp_path, line, says):
    (tmp_path / "bad").write_text(f"1 3 2 0.5 0.5 1 0\n{line}\n")
    dataset = script.QueueDataset()
    dataset.set_use_var(variables(script))
    dataset.set_filelist([tmp_path / "bad"])
    with pytest.raises(DataError, match=says):
        list(dataset.feeds())


def test_refusals_of_datasets(script, files):
    dataset = script.QueueDataset()
    dataset.set_filelist(files)
    with pytest.raises(ConfigError, match="call set_use_var"):
        next(dataset.feeds())
    with pytest.raises(DTypeError, match="float32 or int64"):
        dataset.set_use_var([script.layers.data("wide", [1], dtype="float64")])
    dataset.set_use_var(variables(script))
    dataset.set_pipe_command("exit 3")
    with pytest.raises(DataError, match="ended with 3"):
        list(dataset.feeds())
    for call, says in {
        lambda: dataset.local_shuffle(): "use InMemoryDataset",
        lambda: dataset.set_hdfs_config("a", "b"): "copy the files",
        lambda: dataset.set_batch_size(0): "at least 1",
        lambda: script.InMemoryDataset().set_parse_ins_id(True): "slots of set_use_var alone",
        lambda: script.DatasetFactory().create_dataset("InMemoryDatasets"): "InMemoryDataset",
        lambda: script.Executor().train_from_dataset(): "one of fluid.DatasetFactory",
        lambda: script.Executor().train_from_dataset(dataset=dataset, fetch_info=["loss"]): "1 fetch_info for 0",
        lambda: script.Executor().train_from_dataset(
            dataset=dataset, fetch_handler=print
        ): "a fluid.executor.FetchHandler",
        lambda: script.executor.FetchHandler(): "give the Variables that handler",
    }.items():
        with pytest.raises(ConfigError, match=says):
            call()
    assert isinstance(paddle.fluid.dataset.InMemoryDataset(), script.InMemoryDataset)
