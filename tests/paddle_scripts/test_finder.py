"""`import paddle` gives polyreme's own module objects, or says what is missing and where it is."""

import importlib
import subprocess
import sys

import pytest

import polyreme
from polyreme.errors import ConfigError
from polyreme.paddle_scripts import as_paddle, hints
from polyreme.paddle_scripts.finder import FOLDER, own_name
from polyreme.paddle_scripts.hints import explained, missing_module, missing_name, paddle_names
from polyreme.paddle_scripts.paths import PATHS


@pytest.fixture
def _as_paddle():
    with as_paddle():
        yield


pytestmark = pytest.mark.usefixtures("_as_paddle")


@pytest.mark.parametrize(
    "path", ["nn", "nn.functional", "optimizer.lr", "io", "vision.models", "distributed.fleet", "static", "jit", "amp"]
)
def test_modules_are_the_same_objects_not_copies(path):
    before = importlib.import_module(f"polyreme.{path}")
    assert importlib.import_module(f"paddle.{path}") is before
    assert before.__name__ == before.__spec__.name == f"polyreme.{path}"
    assert importlib.import_module("paddle") is polyreme


def test_every_form_of_import():
    import paddle
    import paddle.nn.functional as F
    import paddle.nn.layer.conv as conv
    from paddle import nn
    from paddle.nn import Linear
    from paddle.nn.layer import Conv2D
    from paddle.static import InputSpec

    assert paddle is polyreme
    assert F is nn.functional is polyreme.nn.functional
    assert nn.Linear is Linear
    assert conv.Conv2D is Conv2D is nn.Conv2D
    assert InputSpec is polyreme.static.InputSpec


def test_a_module_does_not_take_the_place_of_a_function_of_its_name():
    import paddle
    import paddle.amp.auto_cast
    import paddle.distributed.spawn
    import paddle.hapi.model

    assert isinstance(paddle.amp.auto_cast, type) or callable(paddle.amp.auto_cast)
    assert callable(paddle.distributed.spawn)
    assert paddle.tensor([1, 2]).shape == [2]
    q = paddle.ones([1, 2, 1, 8])
    assert paddle.nn.functional.flash_attention(q, q, q)[0].shape == [1, 2, 1, 8]
    assert callable(paddle.distributed.split)


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_path_of_the_table_can_be_imported(path):
    module = importlib.import_module(f"paddle.{path}")
    target = importlib.import_module(f"polyreme.{PATHS[path]}" if PATHS[path] else "polyreme")
    for name in ("to_tensor",) if target is polyreme else getattr(target, "__all__", ()):
        # kinds of random variables have distributions' names there
        if f"{path}.{name}" != "distribution.variable.Independent":
            assert getattr(module, name) is getattr(target, name)


def test_paths_of_the_table_take_no_names_away():
    parents = {path.rpartition(".")[0] for path in PATHS if "." in path}
    modules = {m: importlib.import_module(f"polyreme.{m}") for m in parents if own_name(m) is not None}
    before = {m: {n: v for n, v in vars(module).items() if not n.startswith("__")} for m, module in modules.items()}
    for path in PATHS:
        importlib.import_module(f"paddle.{path}")
    for m, names in before.items():
        for name, value in names.items():
            assert getattr(modules[m], name) is value, f"{m}.{name}"
    assert polyreme.linalg.__name__ == "polyreme.linalg"
    assert polyreme.io.__name__ == "polyreme.io"


DEEP = [
    ("nn.layer.common", "Linear Dropout Embedding"),
    ("nn.layer.norm", "LayerNorm BatchNorm2D"),
    ("nn.layer.transformer", "MultiHeadAttention TransformerEncoder"),
    ("nn.layer", "Layer Conv2D Sequential"),
    ("nn.functional.loss", "cross_entropy"),
    ("nn.initializer.xavier", "XavierUniform"),
    ("tensor", "Tensor to_tensor"),
    ("tensor.math", "add multiply"),
    ("tensor.manipulation", "reshape concat"),
    ("framework", "ParamAttr"),
    ("optimizer.adamw", "AdamW"),
    ("optimizer.optimizer", "Optimizer"),
    ("io.dataloader.dataset", "Dataset IterableDataset"),
    ("io.dataloader.batch_sampler", "BatchSampler DistributedBatchSampler"),
    ("io.reader", "DataLoader"),
    ("jit.api", "to_static"),
    ("hapi.callbacks", "Callback EarlyStopping"),
    ("distributed.collective", "new_group"),
    ("distributed.fleet.meta_parallel.parallel_layers.pp_layers", "LayerDesc SharedLayerDesc PipelineLayer"),
    ("distributed.fleet.meta_parallel.parallel_layers.mp_layers", "ColumnParallelLinear RowParallelLinear"),
    ("distributed.fleet.meta_parallel.parallel_layers.random", "get_rng_state_tracker"),
    ("distributed.fleet.layers.mpu.mp_layers", "VocabParallelEmbedding"),
    ("distributed.fleet.utils.sequence_parallel_utils", "mark_as_sequence_parallel_parameter"),
    ("distributed.fleet.base.topology", "HybridCommunicateGroup"),
    ("distributed.sharding.group_sharded", "group_sharded_parallel"),
    ("utils.unique_name", "generate"),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("path", "names"), DEEP, ids=[p for p, _ in DEEP])
def test_deep_paths_hold_what_users_import_from_them(path, names):
    module = importlib.import_module(f"paddle.{path}")
    for name in names.split():
        assert getattr(module, name) is not None


@pytest.fixture
def sun(monkeypatch):
    """A public module of PaddlePaddle that polyreme does not have."""
    names = {**hints.paddle_names(), "paddle.sun": frozenset({"rise", "set"})}
    names["paddle"] |= {"sun"}
    monkeypatch.setattr(hints, "paddle_names", lambda: names)


@pytest.mark.usefixtures("sun")
def test_missing_modules_say_so():
    with pytest.raises(ModuleNotFoundError, match=r"no module for 'paddle.sun', a public module of Pad.* 2 names"):
        importlib.import_module("paddle.sun")
    with pytest.raises(ModuleNotFoundError, match=r"no module for 'paddle.optimzer'.* did you mean 'paddle.optimizer'"):
        importlib.import_module("paddle.optimzer")
    with pytest.raises(
        ModuleNotFoundError, match=r"in PaddlePaddle Linear is a name in paddle.nn, import it from ther"
    ):
        importlib.import_module("paddle.nn.Linear")
    assert "public modules have none of that name" in missing_module("paddle.moon")


@pytest.mark.usefixtures("sun")
def test_missing_names_say_where_they_are():
    with pytest.raises(ImportError, match=r"cannot import name 'cross_entropy' from 'polyreme.nn'") as caught:
        from paddle.nn import cross_entropy  # noqa: F401
    explained(caught.value)
    assert caught.value.__notes__ == ["PaddlePaddle has cross_entropy in paddle.nn.functional; so does polyreme"]
    with pytest.raises(AttributeError, match="polyreme has no name 'BatchSampler'") as lost:
        polyreme.BatchSampler  # noqa: B018
    explained(lost.value)
    assert lost.value.__notes__ == ["PaddlePaddle has BatchSampler in paddle.io; so does polyreme"]
    assert missing_name("polyreme.fluid", "fc").startswith("PaddlePaddle has fc in paddle.fluid.layers.nn")
    assert missing_name("polyreme.nn", "frobnicate") == "PaddlePaddle has no public name 'frobnicate' either"
    assert missing_name("polyreme", "sun") == "paddle.sun is a module of PaddlePaddle; polyreme does not have it"
    assert missing_name("polyreme", "SyncedAdam").endswith("either")
    assert "polyreme does not have it" in missing_name("polyreme.sun", "rise")
    unrelated = KeyError("x")
    explained(unrelated)
    assert not hasattr(unrelated, "__notes__")


def test_the_names_of_paddle_are_its_public_ones():
    assert len([module for module in paddle_names() if not module.startswith("paddle.fluid")]) == 86
    assert "fc" in paddle_names()["paddle.fluid.layers.nn"]
    assert {"Linear", "Layer"} <= paddle_names()["paddle.nn"]


def test_it_ends_with_the_block_and_refuses_a_paddle_that_is_there():
    assert sys.modules["paddle"] is polyreme
    with as_paddle():  # inside another it changes nothing, and ends nothing
        pass
    assert sys.modules["paddle"] is polyreme
    assert str(FOLDER) in sys.path


def test_a_paddle_imported_before_is_refused(monkeypatch):
    class Other:
        __file__ = "/site-packages/paddle/__init__.py"

    monkeypatch.setitem(sys.modules, "paddle", Other())
    with pytest.raises(ConfigError, match=r"PaddlePaddle \(/site-packages/paddle/__init__.py\) is imported already"):
        as_paddle()


def test_a_stand_in_goes_with_the_block():
    """paddle.fluid.layers.sequence_lod is a path of PaddlePaddle; polyreme.fluid.layers has nothing of that name."""
    code = (
        "import polyreme.fluid as fluid; from polyreme.paddle_scripts import as_paddle\n"
        "with as_paddle():\n"
        "    import paddle.fluid.layers.sequence_lod, paddle.nn.functional\n"
        "    assert paddle.fluid.layers.sequence_lod.sequence_pool is fluid.layers.sequence_pool\n"
        "    from paddle.fluid.layers.rnn import gru_unit\n"
        "    assert gru_unit is fluid.layers.gru_unit and paddle.fluid.layers.rnn is fluid.layers.rnn\n"
        "assert not hasattr(fluid.layers, 'sequence_lod')\n"
        "import polyreme; assert polyreme.nn.functional.relu\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
