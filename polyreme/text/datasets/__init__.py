"""Text data sets read from local files; nothing is downloaded."""

from polyreme.text.datasets.conll05 import Conll05st
from polyreme.text.datasets.imdb import Imdb
from polyreme.text.datasets.imikolov import Imikolov
from polyreme.text.datasets.movielens import Movielens
from polyreme.text.datasets.uci_housing import UCIHousing
from polyreme.text.datasets.wmt14 import WMT14
from polyreme.text.datasets.wmt16 import WMT16

__all__ = ["WMT14", "WMT16", "Conll05st", "Imdb", "Imikolov", "Movielens", "UCIHousing"]
