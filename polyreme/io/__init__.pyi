"""For type checkers: where the names of polyreme.io stand. Written by tools/write_stubs.py."""

from polyreme.io.batch_sampler import BatchSampler as BatchSampler
from polyreme.io.batch_sampler import DistributedBatchSampler as DistributedBatchSampler
from polyreme.io.collate import default_collate_fn as default_collate_fn
from polyreme.io.collate import default_convert_fn as default_convert_fn
from polyreme.io.dataloader import DataLoader as DataLoader
from polyreme.io.dataset import ChainDataset as ChainDataset
from polyreme.io.dataset import ComposeDataset as ComposeDataset
from polyreme.io.dataset import ConcatDataset as ConcatDataset
from polyreme.io.dataset import Dataset as Dataset
from polyreme.io.dataset import IterableDataset as IterableDataset
from polyreme.io.dataset import Subset as Subset
from polyreme.io.dataset import TensorDataset as TensorDataset
from polyreme.io.dataset import random_split as random_split
from polyreme.io.sampler import RandomSampler as RandomSampler
from polyreme.io.sampler import Sampler as Sampler
from polyreme.io.sampler import SequenceSampler as SequenceSampler
from polyreme.io.sampler import SubsetRandomSampler as SubsetRandomSampler
from polyreme.io.sampler import WeightedRandomSampler as WeightedRandomSampler
from polyreme.io.worker_info import get_worker_info as get_worker_info
