"""Run an artefact with jax and safetensors alone: nothing of polyreme, nothing of the model's code.

    python examples/run_artifact_with_jax.py PREFIX INPUT.npy... OUTPUT.npy

PREFIX is what polyreme.jit.save or `polyreme export` wrote to; inputs are in the order of PREFIX.json.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

jax.config.update("jax_enable_x64", True)  # int64 inputs stay int64
prefix, *inputs, output = sys.argv[1:]
program = jax.export.deserialize(bytearray(Path(f"{prefix}.stablehlo").read_bytes()))
outputs = jax.jit(program.call)(load_file(f"{prefix}.safetensors"), [np.load(path) for path in inputs])
np.save(output, outputs[0])
