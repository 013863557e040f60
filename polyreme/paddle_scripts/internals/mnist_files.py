"""Where the files of handwritten digits are published, and their MD5 digests."""

from polyreme.vision.datasets.mnist import MNIST

URL_PREFIX = "https://dataset.bj.bcebos.com/mnist/"
TRAIN_IMAGE_URL = URL_PREFIX + "train-images-idx3-ubyte.gz"
TRAIN_LABEL_URL = URL_PREFIX + "train-labels-idx1-ubyte.gz"
TEST_IMAGE_URL = URL_PREFIX + "t10k-images-idx3-ubyte.gz"
TEST_LABEL_URL = URL_PREFIX + "t10k-labels-idx1-ubyte.gz"
(TRAIN_IMAGE_MD5,), (TRAIN_LABEL_MD5,) = MNIST.DIGESTS["train-images"], MNIST.DIGESTS["train-labels"]
(TEST_IMAGE_MD5,), (TEST_LABEL_MD5,) = MNIST.DIGESTS["t10k-images"], MNIST.DIGESTS["t10k-labels"]
