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


def operations(folder):
    """A model with operations that programs of 1.x alone have."""
    layers = fluid.layers
    program, start = fluid.Program(), fluid.Program()
    with fluid.program_guard(program, start), fluid.unique_name.guard():
        x, ids = fluid.data("image", [2, 4, 4, 6]), fluid.data("ids", [2, 1], "int64")
        row = layers.reshape(x, [2, 96])
        label = layers.one_hot(ids, 96)
        part, few = layers.slice(row, [1], [0], [3]), layers.slice(label, [1], [1], [4])
        factors = [layers.create_parameter([4], "float32") for _ in range(2)]
        which = layers.cast(ids, "int32")
        outs = [
            layers.stanh(x), layers.soft_relu(x, 0.5), layers.clip_by_norm(x, 2.0), layers.reverse(x, [1, 3]),
            layers.cast(layers.has_nan(x), "int32"), layers.cast(layers.isfinite(x), "int32"),
            layers.cos_sim(row, label), layers.bilinear_tensor_product(part, few, 2), layers.lrn(x),
            layers.affine_channel(x, *factors), layers.softmax_with_cross_entropy(row, ids),
            layers.multiplex([row, label, row, label], which), layers.expand_as(layers.slice(x, [1], [0], [1]), x),
            layers.crop(x, [2, 2, 3, 3], [0, 1, 1, 2]), layers.pad_constant_like(x, layers.slice(x, [2], [1], [3]), 0.5),
            layers.shard_index(ids, 8, 2, 1), layers.space_to_depth(x, 2), layers.shuffle_channel(x, 2),
            layers.temporal_shift(x, 2), layers.fsp_matrix(x, x), layers.cumsum(x, 2, exclusive=True, reverse=True),
            layers.resize_nearest(x, [7, 5]), layers.matmul(x, layers.transpose(x, [0, 1, 3, 2]), alpha=0.5),
            layers.reduce_mean(x),
        ]  # fmt: skip
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(start)
    feed = {"image": np.random.RandomState(0).randn(2, 4, 4, 6).astype("float32"), "ids": np.int64([[3], [1]])}
    values = exe.run(program, feed=feed, fetch_list=outs)
    fluid.io.save_inference_model(folder, list(feed), outs, exe, program, "operations", "operations.parameters")
    named = {"out_%d" % i: value for i, value in enumerate(values)}
    np.savez_compressed(folder + "/operations.npz", in_image=feed["image"], in_ids=feed["ids"], **named)


if __name__ == "__main__":
    main(sys.argv[1])
    operations(sys.argv[1])
