"""The example that runs an artefact with jax alone does, in a process that has no polyreme."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyreme as paddle
from polyreme import jit
from polyreme.hapi.input_spec import InputSpec
from polyreme.models.decoders.gpt import GPT, GPTConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "run_artifact_with_jax.py"
# makes `import polyreme` an error
NO_POLYREME = (
    "import sys; sys.modules['polyreme'] = None; import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
)


@pytest.mark.slow
def test_the_example_gives_what_the_model_gives(tmp_path):
    config = GPTConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, seq_len=4, ffn_size=16)
    model = GPT(config)
    jit.save(model, tmp_path / "m", [InputSpec([None, 4], "int64")])
    ids = np.arange(8).reshape(2, 4)
    np.save(tmp_path / "x.npy", ids)
    words = [str(EXAMPLE), str(tmp_path / "m"), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    subprocess.run([sys.executable, "-c", NO_POLYREME, *words], check=True, timeout=120, cwd=tmp_path)
    want = jit.load(tmp_path / "m")(paddle.to_tensor(ids)).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want, rtol=32 * np.finfo(np.float32).eps, atol=1e-6)
