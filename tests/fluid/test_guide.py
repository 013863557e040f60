"""Programs in the manner of the 1.7 single-node guide: each is built, trained and seen to have learned."""

import numpy as np
import pytest

import polyreme as paddle
from polyreme.vision.datasets import FashionMNIST

HOUSE = np.random.RandomState(0).randn(64, 13).astype("float32")
PRICE = (HOUSE @ np.arange(13).reshape(13, 1) / 10 + 3).astype("float32")


def test_linear_regression(script):
    fluid = script
    x = fluid.layers.data(name="x", shape=[13], dtype="float32")
    y = fluid.layers.data(name="y", shape=[1], dtype="float32")
    predicted = fluid.layers.fc(input=x, size=1, act=None)
    loss = fluid.layers.mean(fluid.layers.square_error_cost(input=predicted, label=y))
    assert loss.shape == [1]
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    first = exe.run(feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss])[0]
    for _ in range(100):
        exe.run(fluid.default_main_program(), feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss.name])
    (last,) = exe.run(test_program, feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss])
    assert first.shape == (1,)
    assert first > 9
    assert (float(first * 2), f"{int(first)}", "%.3f" % first) == (2 * first[0], str(int(first[0])), f"{first[0]:.3f}")  # noqa: UP031
    assert type(first.mean()) is np.float32
    with pytest.raises(TypeError):
        float(np.concatenate([first, first]).view(type(first)))
    assert last < 1e-3
    weight = np.array(fluid.global_scope().find_var("fc_0.w_0").get_tensor())
    np.testing.assert_allclose(weight, np.arange(13).reshape(13, 1) / 10, atol=0.02)
    (tensor,) = exe.run(test_program, feed={"x": HOUSE[:3], "y": PRICE[:3]}, fetch_list=[predicted], return_numpy=False)
    assert (tensor.shape(), tensor.lod()) == ([3, 1], [])
    exe.run(fluid.default_startup_program())  # starts over
    (again,) = exe.run(test_program, feed={"x": HOUSE, "y": PRICE}, fetch_list=[loss])
    assert again > 5


def test_fit_a_line_from_a_reader(script):
    fluid = script
    x, y = fluid.data("x", [None, 13]), fluid.data("y", [None, 1])
    loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
    fluid.optimizer.Momentum(0.02, 0.9, regularization=fluid.regularizer.L2Decay(1e-5)).minimize(loss)
    samples = paddle.reader.shuffle(lambda: zip(HOUSE, PRICE, strict=True), buf_size=64)
    feeder = fluid.DataFeeder(place=fluid.CPUPlace(), feed_list=[x, y])
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    for _ in range(15):
        for minibatch in paddle.batch(samples, batch_size=16)():
            (value,) = exe.run(feed=feeder.feed(minibatch), fetch_list=[loss])
    assert value < 0.05


def test_minibatches_of_a_feeder_are_split_over_devices(script):
    fluid = script
    x, y = fluid.data("x", [None, 13]), fluid.data("y", [None, 1])
    loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
    fluid.optimizer.SGD(0.1).minimize(loss)
    compiled = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(
        loss_name=loss.name, places=fluid.cpu_places(2)
    )
    feed = fluid.DataFeeder([x, y], fluid.CPUPlace()).feed(list(zip(HOUSE, PRICE, strict=True)))
    loader = fluid.io.DataLoader.from_generator(feed_list=[x, y], iterable=False)
    loader.set_batch_generator(lambda: [[HOUSE, PRICE]])
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    (first,) = exe.run(compiled, feed=feed, fetch_list=[loss.name])
    loader.start()
    (second,) = exe.run(compiled, fetch_list=[loss.name])
    assert first.shape == second.shape == (2,)
    assert second.mean() < first.mean()


def softmax_regression(fluid, image):
    return fluid.layers.fc(image, 10, act="softmax")


def multilayer_perceptron(fluid, image):
    return fluid.layers.fc(fluid.layers.fc(image, 64, act="relu"), 10, act="softmax")


def convolutional(fluid, image):
    hidden = fluid.nets.simple_img_conv_pool(image, 4, 5, pool_size=2, pool_stride=2, act="relu")
    hidden = fluid.layers.batch_norm(hidden)
    hidden = fluid.nets.simple_img_conv_pool(hidden, 8, 5, pool_size=2, pool_stride=2, act="relu")
    return fluid.layers.fc(hidden, 10, act="softmax")


@pytest.fixture(scope="module")
def clothes():
    """(images [512, 784] from -1 to 1, labels [512])."""
    data = FashionMNIST(mode="train", backend="cv2")
    return np.asarray(data.images[:512], "float32").reshape(512, 784) / 127.5 - 1, np.asarray(
        data.labels[:512], "int64"
    )


@pytest.mark.one_in(2)
@pytest.mark.slow_cases("convolutional")
@pytest.mark.parametrize("network", [softmax_regression, multilayer_perceptron, convolutional])
def test_recognize_digits(script, clothes, network):
    fluid = script
    image = fluid.layers.data("image", [1, 28, 28])
    label = fluid.layers.data("label", [1], dtype="int64")
    predicted = network(fluid, image)
    loss = fluid.layers.mean(fluid.layers.cross_entropy(input=predicted, label=label))
    right = fluid.layers.accuracy(input=predicted, label=label)
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.Adam(learning_rate=0.003).minimize(loss)
    feeder = fluid.DataFeeder([image, label], fluid.CPUPlace())
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    for minibatch in paddle.batch(lambda: zip(*clothes, strict=True), 64)():
        feed = feeder.feed(minibatch)
        for _ in range(8):
            exe.run(feed=feed, fetch_list=[loss, right])
    average = fluid.metrics.Accuracy()
    for minibatch in paddle.batch(lambda: zip(*clothes, strict=True), 256)():
        (value,) = exe.run(test_program, feed=feeder.feed(minibatch), fetch_list=[right])
        average.update(value, weight=len(minibatch))
    assert average.eval() > 0.7  # 0.1 by chance


def test_word2vec(script):
    fluid = script
    text = np.random.RandomState(0).randint(0, 20, 3).tolist() * 40  # the fourth word follows from the three before
    words = [fluid.layers.data(f"word{i}", [1], dtype="int64") for i in range(3)]
    target = fluid.layers.data("next", [1], dtype="int64")
    rows = [fluid.layers.embedding(w, [20, 8], param_attr=fluid.ParamAttr(name="shared")) for w in words]
    hidden = fluid.layers.fc(fluid.layers.concat(rows, axis=1), 16, act="sigmoid")
    predicted = fluid.layers.fc(hidden, 20, act="softmax")
    loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, target))
    fluid.optimizer.Adagrad(0.3).minimize(loss)
    names = [p.name for p in fluid.default_main_program().all_parameters()]
    assert names == ["shared", "fc_0.w_0", "fc_0.b_0", "fc_1.w_0", "fc_1.b_0"]
    grams = np.array([text[i : i + 4] for i in range(100)])
    feed = {f"word{i}": grams[:, i : i + 1] for i in range(3)} | {"next": grams[:, 3:]}
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    values = [exe.run(feed=feed, fetch_list=[loss])[0][0] for _ in range(40)]
    assert values[0] > 2
    assert values[-1] < 0.1


def test_sentiment_of_sequences(script):
    fluid = script
    words = fluid.layers.data("words", [1], dtype="int64", lod_level=1)
    label = fluid.layers.data("label", [1], dtype="int64")
    rows = fluid.layers.embedding(words, [30, 8])
    wide = fluid.nets.sequence_conv_pool(rows, 8, 3, act="tanh", pool_type="sqrt")
    average = fluid.layers.sequence_pool(fluid.layers.fc(rows, 8, act="relu"), "average")
    predicted = fluid.layers.fc([wide, average], 2, act="softmax")
    loss = fluid.layers.mean(fluid.layers.cross_entropy(predicted, label))
    fluid.optimizer.Adam(0.05).minimize(loss)
    random = np.random.RandomState(0)
    texts = [random.randint(0, 30, n).tolist() for n in random.randint(1, 9, 32)]
    samples = [(t, sum(w < 10 for w in t) * 2 > len(t)) for t in texts]
    feed = fluid.DataFeeder([words, label], fluid.CPUPlace()).feed(samples)
    assert feed["words"].recursive_sequence_lengths() == [[len(t) for t in texts]]
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    values = [exe.run(feed=feed, fetch_list=[loss])[0][0] for _ in range(30)]
    assert values[0] > 0.4
    assert values[-1] < 0.1
    (tensor,) = exe.run(feed=feed, fetch_list=[rows], return_numpy=False)
    assert tensor.recursive_sequence_lengths() == [[len(t) for t in texts]]


def test_while_sums_as_the_guide_says(script):
    fluid, layers = script, script.layers
    i, n = layers.fill_constant([1], "int64", 0), layers.fill_constant([1], "int64", 10)
    total = layers.fill_constant([1], "float32", 0)
    go = layers.less_than(i, n)
    loop = layers.While(cond=go)
    with loop.block():
        layers.assign(total + layers.cast(i, "float32"), output=total)
        i = layers.increment(x=i, value=1, in_place=True)
        layers.less_than(x=i, y=n, cond=go)
    found = fluid.Executor(fluid.CPUPlace()).run(fetch_list=[total, i])
    assert [v.tolist() for v in found] == [[45.0], [10]]


def test_learning_rate_of_a_switch(script):
    fluid, layers = script, script.layers
    x = layers.data("x", [2])
    loss = layers.mean(layers.fc(x, 1, bias_attr=False))
    step = layers.autoincreased_step_counter(begin=0)
    rate = layers.create_global_var([1], 0.0, "float32", persistable=True, name="learning_rate")
    with layers.Switch() as switch:
        with switch.case(layers.less_than(step, layers.fill_constant([1], "int64", 2))):
            layers.assign(layers.fill_constant([1], "float32", 0.5), output=rate)
        with switch.case(layers.less_than(step, layers.fill_constant([1], "int64", 3))):
            layers.assign(layers.fill_constant([1], "float32", 0.25), output=rate)
        with switch.default():
            layers.assign(layers.fill_constant([1], "float32", 0.125), output=rate)
    fluid.optimizer.SGD(rate).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    weight = fluid.global_scope().find_var("fc_0.w_0").get_tensor()
    before = np.array(weight)
    for expected in (0.5, 0.5, 0.25, 0.125, 0.125):
        (used,) = exe.run(feed={"x": np.ones((4, 2), "float32")}, fetch_list=["learning_rate"])
        after = np.array(weight)
        assert used == expected
        np.testing.assert_allclose(before - after, np.full((2, 1), expected), rtol=1e-6)
        before = after


def test_two_programs_share_parameters_by_name(script):
    fluid = script
    startup = fluid.Program()
    attrs = {"param_attr": fluid.ParamAttr(name="w"), "bias_attr": fluid.ParamAttr(name="b")}

    def build(train):
        program = fluid.Program()
        with fluid.program_guard(program, startup):
            x, y = fluid.data("x", [None, 13]), fluid.data("y", [None, 1])
            loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1, **attrs), y))
            if train:
                fluid.optimizer.Adam(0.5).minimize(loss)
        return program, loss.name

    (train, trained), (test, tested) = build(True), build(False)
    assert sum("initialize" in line for line in str(startup).splitlines()) == 2
    exe, feed = fluid.Executor(fluid.CPUPlace()), {"x": HOUSE, "y": PRICE}
    exe.run(startup)
    before = exe.run(test, feed=feed, fetch_list=[tested])[0]
    for _ in range(60):
        exe.run(train, feed=feed, fetch_list=[trained])
    after = exe.run(test, feed=feed, fetch_list=[tested])[0]
    assert after < 0.1 * before


def test_a_program_reads_from_its_loader_until_the_end(script):
    fluid = script
    x, y = fluid.data("x", [None, 13]), fluid.data("y", [None, 1])
    loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(x, 1), y))
    loader = fluid.reader.DataLoader.from_generator(feed_list=[x, y], capacity=2, iterable=False)
    loader.set_sample_generator(lambda: zip(HOUSE, PRICE, strict=True), batch_size=16)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    with pytest.raises(paddle.errors.ProgramError, match="not started"):
        exe.run(fetch_list=[loss])
    for _ in range(2):
        loader.start()
        assert all(exe.run(fetch_list=[loss])[0].shape == (1,) for _ in range(4))
        with pytest.raises(fluid.core.EOFException, match="no more minibatches"):
            exe.run(fetch_list=[loss])
        loader.reset()


def test_an_iterable_loader(script):
    fluid = script
    x = fluid.data("x", [None, 13])
    loader = fluid.reader.PyReader(feed_list=[x], capacity=2, iterable=True)
    loader.decorate_batch_generator(lambda: ([HOUSE[i : i + 8]] for i in (0, 8)), fluid.cpu_places(1))
    mean = fluid.layers.mean(x)
    exe = fluid.Executor(fluid.CPUPlace())
    found = [exe.run(feed=feed, fetch_list=[mean])[0][0] for feed in loader()]
    np.testing.assert_allclose(found, [HOUSE[:8].mean(), HOUSE[8:16].mean()], rtol=1e-5, atol=1e-7)


def test_dygraph(script):
    fluid = script

    class Net(fluid.dygraph.Layer):
        def __init__(self):
            super().__init__()
            self.conv = fluid.dygraph.Conv2D(1, 2, 3, act="relu")
            self.pool = fluid.dygraph.Pool2D(2, "max", 2)
            self.fc = fluid.dygraph.Linear(2 * 3 * 3, 2, act="softmax")

        def forward(self, image):
            hidden = self.pool(self.conv(image))
            return self.fc(fluid.layers.reshape(hidden, [-1, 2 * 3 * 3]))

    with fluid.dygraph.guard(fluid.CPUPlace()):
        assert fluid.in_dygraph_mode()
        net = Net()
        adam = fluid.optimizer.Adam(0.05, parameter_list=net.parameters())
        images = np.random.RandomState(0).randn(8, 1, 8, 8).astype("float32")
        image, label = map(fluid.dygraph.to_variable, (images, (images.mean((1, 2, 3)) > 0)[:, None].astype("int64")))
        values = []
        for _ in range(25):
            loss = fluid.layers.mean(fluid.layers.cross_entropy(net(image), label))
            loss.backward()
            adam.minimize(loss)
            net.clear_gradients()
            values.append(loss.numpy()[0])
        assert values[-1] < 0.5 * values[0]
    assert not fluid.in_dygraph_mode()
    assert isinstance(fluid.layers.data("x", [2]) + 1.0, fluid.Variable)
