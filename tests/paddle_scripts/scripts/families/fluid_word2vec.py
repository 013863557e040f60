"""The word2vec of book_word2vec.py by Fluid: what this prints is what PaddlePaddle prints for that."""

import tempfile

import numpy as np
import paddle
import paddle.fluid as fluid

EMBED_SIZE, HIDDEN_SIZE, N, DICT_SIZE, BATCH = 6, 8, 5, 20, 10
WORDS = ("firstw", "secondw", "thirdw", "fourthw", "nextw")


def start(name, *shape):
    value = np.random.RandomState(sum(map(ord, name))).normal(0, 0.4, shape).astype("float32")
    return fluid.ParamAttr(name=name, initializer=fluid.initializer.NumpyArrayInitializer(value))


def reader():
    rng = np.random.RandomState(17)
    sentence = (np.cumsum(rng.randint(1, 4, 44)) % DICT_SIZE).tolist()
    for i in range(len(sentence) - N + 1):
        yield tuple(sentence[i : i + N])


def inference_program(words):
    embeds = [
        fluid.embedding(
            input=word,
            size=[DICT_SIZE, EMBED_SIZE],
            dtype="float32",
            is_sparse=True,
            param_attr=start("shared_w", DICT_SIZE, EMBED_SIZE),
        )
        for word in words
    ]
    concat = fluid.layers.concat(
        input=[fluid.layers.reshape(embed, shape=[-1, EMBED_SIZE]) for embed in embeds], axis=1
    )
    hidden = fluid.layers.fc(
        input=concat, size=HIDDEN_SIZE, act="sigmoid", param_attr=start("hidden_w", 4 * EMBED_SIZE, HIDDEN_SIZE)
    )
    return fluid.layers.fc(
        input=hidden, size=DICT_SIZE, act="softmax", param_attr=start("out_w", HIDDEN_SIZE, DICT_SIZE)
    )


def train_program(predict, target):
    return fluid.layers.mean(fluid.layers.cross_entropy(input=predict, label=target))


main, startup = fluid.Program(), fluid.Program()
with fluid.program_guard(main, startup):
    words = [fluid.data(name=word, shape=[None, 1], dtype="int64") for word in WORDS]
    predict = inference_program(words[:4])
    loss = train_program(predict, words[4])
    test = main.clone(for_test=True)
    fluid.optimizer.SGD(learning_rate=0.2).minimize(loss)
place = fluid.CPUPlace()
executor = fluid.Executor(place)
executor.run(startup)
feeder = fluid.DataFeeder(feed_list=words, place=place)
train_reader = paddle.batch(reader, BATCH)
for epoch in range(2):
    for step, data in enumerate(train_reader()):
        (value,) = executor.run(main, feed=feeder.feed(data), fetch_list=[loss])
        print(f"epoch {epoch} step {step} loss {value.item():.4f}")
scores, value = executor.run(test, feed=feeder.feed(data), fetch_list=[predict, loss])
print("test", scores.shape, f"{value.item():.4f}")
with tempfile.TemporaryDirectory() as folder:
    fluid.io.save_inference_model(folder, list(WORDS[:4]), [predict], executor, main_program=test)
    with fluid.scope_guard(fluid.core.Scope()):
        program, names, targets = fluid.io.load_inference_model(folder, executor)
        columns = np.array(data, "int64").T.reshape(N, -1, 1)[:4, :3]
        (served,) = executor.run(program, feed=dict(zip(names, columns)), fetch_list=targets)
print("served", served.shape, np.allclose(served, scores[:3], atol=1e-6))
ranked = np.argsort(-served, kind="stable", axis=1)[:, :3]
print("next words", ranked.tolist(), f"{served[0, ranked[0, 0]]:.4f}")
