"""What workers cannot import goes to them by value: local classes, lambdas, notebooks, scripts without a guard."""

import code
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from polyreme import io, nn, vision
from polyreme.errors import DataError
from tests.io import sources

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
import os, sys, threading
import numpy as np
from polyreme.io import DataLoader, Dataset

print("run")
lock, scale, reads = threading.Lock(), np.full(3, 2.0), 0

class Row:
    def __init__(self, i):
        self.i = i

    def doubled(self):
        return self.i * scale

class Rows(Dataset):
    def __getitem__(self, i):
        global reads
        with lock:
            reads += 1
        return Row(i), reads, "jax" in sys.modules, os.environ["JAX_PLATFORMS"]

    def __len__(self):
        return 4

doubled = Row.doubled
batches = list(DataLoader(Rows(), batch_size=2, num_workers=1, collate_fn=lambda rows: rows))
print([(row.i, row.doubled().tolist(), type(row) is Row, *rest) for batch in batches for row, *rest in batch])
print(reads, Row.doubled is doubled)
"""
SEEN = ["run", str([(i, [2.0 * i] * 3, True, i + 1, False, "cpu") for i in range(4)]), "0 True"]


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_a_script_without_a_guard_runs_once(how, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words, given = (["script.py"], None) if how == "file" else (["-"], SCRIPT)
    run = subprocess.run(
        [sys.executable, *words], input=given, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    assert run.stdout.splitlines() == SEEN, run.stderr


@pytest.mark.process
def test_definitions_of_a_console_and_of_a_process_started_from_a_script(capsys, monkeypatch):
    console = code.InteractiveInterpreter()
    for cell in ("import numpy as np", textwrap.dedent(SCRIPT)):
        console.runcode(compile(cell, "<cell>", "exec"))
    assert capsys.readouterr().out.splitlines() == SEEN
    # what multiprocessing calls the script in a process that it spawned
    script = types.ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    exec(SCRIPT, vars(script))
    assert capsys.readouterr().out.splitlines() == SEEN


@pytest.mark.parametrize("shared", [True, False])
def test_local_definitions_with_every_kind_of_loader(shared):
    offset, large = 10, np.arange(4000.0)

    class Local(sources.Sample):
        pass

    class Rows(io.Dataset):
        def __init__(self):
            self.lock = threading.RLock()

        def __getitem__(self, i):
            with self.lock:
                return Local(i + offset), large[i], (lambda: i) if i == 5 else None

        def __len__(self):
            return 6

    class Stream(io.IterableDataset):
        def __iter__(self):
            info = io.get_worker_info()
            yield from (large[i] + info.dataset.start for i in range(info.id, 4, info.num_workers))

    marks = []
    settings = {"num_workers": 2, "use_shared_memory": shared, "persistent_workers": True}
    collate = lambda rows: ([row for row, *_ in rows], np.stack([x for _, x, _ in rows]), rows[-1][2], list(marks))
    rows = io.DataLoader(Rows(), batch_size=2, collate_fn=collate, worker_init_fn=lambda w: marks.append(w), **settings)
    for _ in range(2):
        running = iter(rows)
        for start, worker in ((0, 0), (2, 1)):
            samples, values, _, seen = next(running)
            assert samples == [Local(start + 10), Local(start + 11)]
            assert [type(sample) for sample in samples] == [Local, Local]
            assert values.numpy().tolist() == [start, start + 1]
            assert seen == [worker]
        # a function that the worker made has no definition here
        with pytest.raises(DataError, match=r"worker 0 .* failed sending its batch"):
            next(running)
    assert marks == []
    stream = Stream()
    stream.start = 100
    loader = io.DataLoader(stream, batch_size=None, worker_init_fn=lambda w: None, **settings)
    for _ in range(2):
        assert [float(x) for x in loader] == [100, 101, 102, 103]


def test_a_local_class_that_uses_modules_of_this_package():
    flip = lambda image: vision.transforms.functional.hflip(image)

    class Rows(vision.datasets.DatasetFolder):
        def __init__(self):
            self.width = len(nn.initializer.__name__)

        def __getitem__(self, i):
            return flip(np.arange(self.width + i, dtype="float32")[None, :, None])[0, 0, 0]

        def __len__(self):
            return 3

    (batch,) = io.DataLoader(Rows(), batch_size=3, num_workers=1)
    last = len("polyreme.nn.initializer") - 1
    assert batch.numpy().tolist() == [last, last + 1, last + 2]


def test_a_failure_in_a_local_class_names_the_sample():
    class Failing(io.Dataset):
        def __getitem__(self, i):
            return {"a": 1}["b" if i == 3 else "a"]

        def __len__(self):
            return 4

    with pytest.raises(DataError, match=r"failed reading sample 3.*KeyError: 'b'"):
        list(io.DataLoader(Failing(), num_workers=1))


@pytest.mark.process
def test_what_cannot_be_pickled_is_named():
    rows = types.SimpleNamespace(files=[1, {"log": (i for i in ())}], __len__=None)
    stream = open(os.devnull, "rb")  # noqa: SIM115

    class Rows(io.Dataset):
        def __getitem__(self, i):
            return i

        def __len__(self):
            return 2

    data = Rows()
    for settings, name in (
        ({"worker_init_fn": lambda w: stream.read()}, "stream of worker_init_fn, a BufferedReader"),
        ({"collate_fn": lambda batch: rows.files}, r"\['log'\] of \[1\] of files of rows of collate_fn, a generator"),
    ):
        with pytest.raises(DataError, match=f"copy of {name}, which cannot be pickled .*num_workers=0"):
            list(io.DataLoader(data, num_workers=1, **settings))
    stream.close()
    data.__class__.__getitem__ = types.MethodType(lambda self, i: next(rows.files[1]["log"]), data)
    with pytest.raises(DataError, match=r"__getitem__ of Rows of dataset"):
        list(io.DataLoader(data, num_workers=1))
