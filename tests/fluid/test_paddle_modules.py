"""Modules of Fluid that scripts import by paths of their own: what is here, and stand-ins for the rest."""

import copy
import importlib

import numpy as np
import pytest

from polyreme import fluid, static
from polyreme.errors import AbsentError
from polyreme.paddle_scripts import as_paddle

SAME = {
    "contrib.mixed_precision.decorator": ("decorate", fluid.contrib.mixed_precision.decorate),
    "contrib.mixed_precision.fp16_lists": ("AutoMixedPrecisionLists", static.amp.AutoMixedPrecisionLists),
    "contrib.layers.rnn_impl": ("basic_lstm", fluid.contrib.layers.basic_lstm),
    "incubate.fleet.base.fleet_base": ("Fleet", fluid.incubate.fleet.base.fleet_base.Fleet),
    "transpiler.distribute_transpiler": ("DistributeTranspilerConfig", fluid.DistributeTranspilerConfig),
    "transpiler.memory_optimization_transpiler": ("memory_optimize", fluid.memory_optimize),
    "contrib.trainer": ("Trainer", fluid.Trainer),
    "core_avx": ("AnalysisConfig", fluid.core.AnalysisConfig),
    "layers": ("Variable", static.Variable),
}
STAND_INS = {
    "transpiler.ps_dispatcher": ("RoundRobin", "parameter servers"),
    "incubate.fleet.parameter_server.pslib": ("PSLib", "parameter servers"),
    "contrib.slim.quantization": ("QuantizationTransformPass", "quantization"),
    "contrib.decoder.beam_search_decoder": ("StateCell", "beam_search in a While"),
}


@pytest.mark.parametrize("module", SAME)
def test_a_module_has_the_same_things(module):
    name, value = SAME[module]
    with as_paddle():
        found = importlib.import_module(f"paddle.fluid.{module}")
        assert getattr(found, name) is value


def test_texts_and_curves_of_1_x(tmp_path, monkeypatch):
    with as_paddle():
        compat, plot = (importlib.import_module(f"paddle.{name}") for name in ("compat", "utils.plot"))
        assert compat.to_text([b"a", "b", 3]) == ["a", "b", 3]
        texts = {b"a": "b"}
        assert compat.to_text(texts, inplace=True) is texts == {"a": "b"}
        assert compat.to_bytes("\u00e9") == b"\xc3\xa9"
        assert [compat.round(v, 1) for v in (0.25, -0.25, 1.0)] == [0.3, -0.3, 1.0]
        curves = plot.Ploter("train", "test")
        curves.append("train", 1, np.float32([2.5]))
        monkeypatch.setattr("matplotlib.pyplot.savefig", lambda path: path.write_text("drawn"))
        curves.plot(tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_text() == "drawn"
        with pytest.raises(KeyError):
            curves.append("valid", 1, 2.0)


@pytest.mark.parametrize("module", STAND_INS)
def test_what_is_not_here_says_so_when_it_is_called(module):
    name, says = STAND_INS[module]
    with as_paddle():
        stand_in = getattr(importlib.import_module(f"paddle.fluid.{module}"), name)
        with pytest.raises(AbsentError, match=says):
            stand_in()


def test_names_of_1x_for_values_counters_and_errors(script):
    with as_paddle():
        paddle_fluid = importlib.import_module("paddle.fluid")
        counters = copy.deepcopy(paddle_fluid.unique_name.generator)
        names = [script.unique_name.generate("fc") for _ in range(2)]
        with script.unique_name.guard(counters):
            assert script.unique_name.generate("fc") == names[0]
        script.layers.create_parameter([2], "float32", "w", default_initializer=script.initializer.Constant(3.0))
        fetch = importlib.import_module("paddle.fluid.executor")._fetch_var
        with pytest.raises(paddle_fluid.core.EnforceNotMet, match="no variable 'w'"):
            fetch("w")
        script.Executor().run(script.default_startup_program())
        assert fetch("w").tolist() == [3.0, 3.0]
