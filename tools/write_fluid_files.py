"""Writes tests/paddle_files/fluid: what PaddlePaddle 1.8.5 saves of a small Program, and its losses afterwards.

python3.7 -m venv V && V/bin/pip install paddlepaddle==1.8.5 "protobuf<3.21"
V/bin/python tools/write_fluid_files.py tests/paddle_files/fluid
"""

import os
import sys

import numpy as np
import paddle.fluid as fluid

FEED = {"x": np.float32([[1, 2], [3, -1], [0.5, 0.25]]), "y": np.float32([[1], [0], [-1]])}


def main(folder):
    layers, attr = fluid.layers, fluid.ParamAttr
    program, start = fluid.Program(), fluid.Program()
    start.random_seed = 1
    with fluid.program_guard(program, start), fluid.unique_name.guard():
        x, y = fluid.data("x", [None, 2]), fluid.data("y", [None, 1])
        hidden = layers.batch_norm(layers.fc(x, 2, bias_attr=False))
        out = layers.fc(hidden, 1, act="tanh", param_attr=attr(name="weight"))
        loss = layers.mean(layers.square_error_cost(out, y))
        evaluation = program.clone(for_test=True)
        fluid.optimizer.Adam(layers.exponential_decay(0.1, 2, 0.5)).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(start)

    def train():
        return [exe.run(program, feed=FEED, fetch_list=[loss])[0].item() for _ in range(3)]

    train()
    fluid.io.save_persistables(exe, folder + "/variables", program)
    fluid.io.save_persistables(exe, folder, program, filename="all")
    fluid.save(program, folder + "/model")
    os.remove(folder + "/model.pdmodel")  # which nothing here reads
    fluid.io.save_inference_model(folder + "/inference", ["x"], [out], exe, evaluation)
    (result,) = exe.run(evaluation, feed=FEED, fetch_list=[out])
    np.savez(folder + "/values.npz", out=result, losses=np.float32(train()), **FEED)


if __name__ == "__main__":
    main(sys.argv[1])
