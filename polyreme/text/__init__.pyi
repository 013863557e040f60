"""For type checkers: where the names of polyreme.text stand. Written by tools/write_stubs.py."""

from polyreme.text.datasets import Conll05st as Conll05st
from polyreme.text.datasets import Imdb as Imdb
from polyreme.text.datasets import Imikolov as Imikolov
from polyreme.text.datasets import Movielens as Movielens
from polyreme.text.datasets import UCIHousing as UCIHousing
from polyreme.text.datasets import WMT14 as WMT14
from polyreme.text.datasets import WMT16 as WMT16
from polyreme.text.viterbi_decoder import ViterbiDecoder as ViterbiDecoder
from polyreme.text.viterbi_decoder import viterbi_decode as viterbi_decode
from polyreme.text import datasets as datasets
