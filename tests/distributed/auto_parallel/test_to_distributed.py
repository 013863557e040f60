"""to_distributed: a plain model on all devices by a plan that is chosen, trained as on one."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.distributed import to_distributed
from polyreme.distributed.auto_parallel.engine.to_distributed import ToDistributedConfig
from polyreme.distributed.placement import clear_plan
from polyreme.errors import ConfigError, DeviceError
from polyreme.hapi import InputSpec
from polyreme.io import DataLoader, Dataset, IterableDataset

from .small_models import RATE, STEPS, Plain, assert_same, train


class Words(Dataset):
    """Sequences of 9 words: the first 8, and the 8 that follow each."""

    def __getitem__(self, i):
        ids = np.random.default_rng(i).integers(0, 16, 9)
        return {"x": ids[:-1], "y": ids[1:]} if self.named else (ids[:-1], ids[1:])

    def __len__(self):
        return 8 * STEPS

    def __init__(self, named=False):
        self.named = named


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Words()[i] for i in range(16))


def parts(dataset):
    model = Plain()
    return model, paddle.optimizer.Momentum(RATE, 0.9, parameters=model.parameters()), DataLoader(dataset, batch_size=8)


@pytest.fixture(autouse=True)
def _no_plan_is_left():
    yield
    clear_plan()


def test_it_trains_as_on_one_device(caplog):
    model, optimizer, loader = parts(Words())
    want = train(model, optimizer, list(loader))
    with caplog.at_level("INFO"):
        model, optimizer, loader = to_distributed(*parts(Words()), device_num=4, node_num=2)
    assert "8 x cpu" in caplog.text  # what was chosen, and why
    batches = list(loader())
    assert len(loader) == len(batches) == STEPS
    assert len(batches[0][0]._array.sharding.device_set) == 8
    assert_same(train(model, optimizer, batches), want)


def test_inputs_are_found_in_dicts_or_given():
    specs = [InputSpec([None, 8], "int64"), InputSpec([None, 8], "int64")]
    for dataset, config in ((Words(True), None), (Stream(), ToDistributedConfig(specs, sequence_parallel=True))):
        _, _, loader = to_distributed(*parts(dataset), 2, config=config)
        batch = next(iter(loader))
        assert len((batch["x"] if isinstance(batch, dict) else batch[0])._array.sharding.device_set) == 2
        clear_plan()


def test_what_is_wrong_is_told():
    model, optimizer, loader = parts(Words())
    for message, call in [
        ("model is a int; give a Layer", lambda: to_distributed(3, optimizer, loader, 8)),
        ("dataloader is a list", lambda: to_distributed(model, optimizer, [], 8)),
        ("device_num=0", lambda: to_distributed(model, optimizer, loader, 0)),
        ("dataset is iterable", lambda: to_distributed(*parts(Stream()), 8)),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(DeviceError, match="16 devices are asked for, 8 are there"):
        to_distributed(model, optimizer, loader, 8, 2)
