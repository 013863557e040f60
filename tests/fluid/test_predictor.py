"""1.x's predictor serves what fluid.io.save_inference_model wrote, sequences too."""

import numpy as np
import pytest

from polyreme.errors import ConfigError, ShapeError
from polyreme.fluid import core, create_lod_tensor

IDS = np.array([[1], [2], [3], [0], [2]])


@pytest.fixture
def saved(script, tmp_path):
    """(folder, what the Program gives for rows and for IDS in sequences of 2 and 3)."""
    layers = script.layers
    x, ids = script.data("x", [None, 3], "float32"), script.data("ids", [None, 1], "int64", lod_level=1)
    wide, _ = layers.dynamic_lstm(layers.fc(layers.embedding(ids, [5, 4]), 8), 8)
    scores = layers.fc(layers.concat([x, layers.sequence_pool(wide, "max")], axis=1), 2, act="softmax")
    exe = script.Executor(script.CPUPlace())
    exe.run(script.default_startup_program())
    feed = {"x": np.arange(6, dtype="float32").reshape(2, 3) / 6, "ids": create_lod_tensor(IDS, [[2, 3]], "cpu")}
    values = [np.asarray(v) for v in exe.run(feed=feed, fetch_list=[scores, wide], return_numpy=False)]
    script.io.save_inference_model(str(tmp_path), list(feed), [scores, wide], exe)
    return str(tmp_path), feed["x"], values


def test_a_predictor_gives_what_the_program_gave(saved):
    folder, rows, (scores, wide) = saved
    config = core.AnalysisConfig(folder)
    config.disable_gpu()
    config.switch_ir_optim(True)
    config.pass_builder().delete_pass("fc_gru_fuse_pass")
    predictor = core.create_paddle_predictor(config)
    assert predictor.get_input_names() == ["x", "ids"]
    first, second = predictor.run([core.PaddleTensor(rows), core.PaddleTensor(IDS, lod=[[0, 2, 5]])])
    np.testing.assert_array_equal(first.as_ndarray(), scores)
    assert first.data.float_data() == scores.reshape(-1).tolist()
    np.testing.assert_array_equal(second.as_ndarray(), wide)
    assert second.lod == [[0, 2, 5]]
    predictor.get_input_tensor("x").copy_from_cpu(rows)
    fed = predictor.get_input_tensor("ids")
    fed.copy_from_cpu(IDS)
    fed.set_lod([[0, 2, 5]])
    predictor.zero_copy_run()
    name = predictor.get_output_names()[0]
    np.testing.assert_array_equal(predictor.get_output_tensor(name).copy_to_cpu(), scores)
    with pytest.raises(ShapeError, match="1 inputs"):
        predictor.run([core.PaddleTensor(rows)])
    with pytest.raises(ConfigError, match="the model has no input 'idz'; did you mean 'ids'"):
        predictor.get_input_tensor("idz")


def test_what_a_configuration_refuses():
    with pytest.raises(ConfigError, match="names no model"):
        core.create_paddle_predictor(core.AnalysisConfig())
    with pytest.raises(ConfigError, match="tensorrt_engine cannot be honoured"):
        core.AnalysisConfig("folder").enable_tensorrt_engine()
    with pytest.raises(AttributeError, match="did you mean 'disable_gpu'"):
        core.AnalysisConfig("folder").disable_gpus()
