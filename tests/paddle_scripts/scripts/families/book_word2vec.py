"""Word2vec as the book has it, as a static program: four words, one shared table, the next word, a saved program."""

import os
import tempfile

import numpy as np
import paddle
import paddle.static as static
from paddle.nn.functional import cross_entropy
from paddle.nn.initializer import Assign

EMBED_SIZE, HIDDEN_SIZE, N, DICT_SIZE, BATCH = 6, 8, 5, 20, 10
WORDS = ("firstw", "secondw", "thirdw", "fourthw", "nextw")


def start(name, *shape):
    seed = sum(map(ord, name))
    value = np.random.RandomState(seed).normal(0, 0.4, shape).astype("float32")
    return paddle.ParamAttr(name=name, initializer=Assign(value))


def reader():
    rng = np.random.RandomState(17)
    sentence = (np.cumsum(rng.randint(1, 4, 44)) % DICT_SIZE).tolist()
    for i in range(len(sentence) - N + 1):
        yield tuple(sentence[i : i + N])


def batches():
    grams = list(reader())
    for i in range(0, len(grams), BATCH):
        columns = np.array(grams[i : i + BATCH], "int64").T.reshape(N, -1, 1)
        yield dict(zip(WORDS, columns))


def inference_program(words):
    table = start("shared_w", DICT_SIZE, EMBED_SIZE)
    embeds = [static.nn.embedding(word, [DICT_SIZE, EMBED_SIZE], param_attr=table, dtype="float32") for word in words]
    concat = paddle.concat([paddle.reshape(embed, [-1, EMBED_SIZE]) for embed in embeds], axis=1)
    hidden = static.nn.fc(
        concat, HIDDEN_SIZE, activation="sigmoid", weight_attr=start("hidden_w", 4 * EMBED_SIZE, HIDDEN_SIZE)
    )
    return static.nn.fc(hidden, DICT_SIZE, activation="softmax", weight_attr=start("out_w", HIDDEN_SIZE, DICT_SIZE))


paddle.enable_static()
main, startup = static.Program(), static.Program()
with static.program_guard(main, startup):
    *context, target = [static.data(name=word, shape=[None, 1], dtype="int64") for word in WORDS]
    predict = inference_program(context)
    cost = cross_entropy(predict, target, use_softmax=False)
    loss = paddle.mean(cost)
    test = main.clone(for_test=True)
    paddle.optimizer.SGD(learning_rate=0.2).minimize(loss)
executor = static.Executor(paddle.CPUPlace())
executor.run(startup)
for epoch in range(2):
    for step, batch in enumerate(batches()):
        (value,) = executor.run(main, feed=batch, fetch_list=[loss])
        print(f"epoch {epoch} step {step} loss {value.item():.4f}")
scores, value = executor.run(test, feed=batch, fetch_list=[predict, loss])
print("test", scores.shape, f"{value.item():.4f}")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "word2vec")
    static.save_inference_model(path, context, [predict], executor, program=test)
    program, names, targets = static.load_inference_model(path, executor)
    (served,) = executor.run(program, feed={name: batch[name][:3] for name in names}, fetch_list=targets)
print("served", served.shape, np.allclose(served, scores[:3], atol=1e-6))
ranked = np.argsort(-served, kind="stable", axis=1)[:, :3]
print("next words", ranked.tolist(), f"{served[0, ranked[0, 0]]:.4f}")
paddle.disable_static()
