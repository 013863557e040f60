"""Made-up alignments (MSA) of made-up proteins, whose columns vary together where the residues touch.

A protein is a chain in space, and a family of sequences that evolved under it:

    chain     residues 3.8 apart, each direction the last one's, turned at random and pulled to the middle, so that the
              chain is folded up
    contacts  pairs of residues more than three apart in the chain, nearest first, each residue in one pair at most,
              none farther apart than CONTACT
    letters   a residue that no pair begins with has a usual letter, which a sequence has with probability CONSERVED,
              else any of the twenty; the second of a pair has, with probability COUPLED, the letter that PARTNER gives
              for the first's, a table that is the same for all proteins; a letter is a gap with probability GAPS
    masks     MASKED of all letters, as many in each alignment, which are asked for

So a model can do better than guess by a column's usual letter, by the letter of a residue's partner in the same
sequence, and, for distances, by the chain and by which columns vary together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from polyreme.errors import DataError
from polyreme.io.sampler import RandomSampler
from polyreme.models.families import DISTANCE_BINS, LETTERS
from polyreme.recipes.config import ModelConfig, PretrainConfig
from polyreme.recipes.data.batches import Batch

BOND = 3.8
"""Angstroms between neighbours in the chain: between alpha carbons."""
CONTACT = 8.0
"""Angstroms. Nearer residues are in contact, as CASP has it."""
CONSERVED, COUPLED, GAPS, MASKED = 0.5, 0.9, 0.05, 0.15
EDGES = np.linspace(4.0, 22.0, DISTANCE_BINS - 1)
"""Distances, in Angstroms, between one class and the next."""
_GAP = LETTERS - 1
_MASK = LETTERS
_NAMES = "ARNDCQEGHILKMFPSTWYV-?"
_NONE = -100  # what cross-entropy leaves out
_FORMAT = 1  # raised when samples of the same seed become others, so that no run is resumed on them
PARTNER = np.random.default_rng(0).permutation(_GAP)


class AlignmentDataset:
    """Alignments first to first + count - 1 of those of a seed: map-style, each drawn when it is asked for.

    Item i is (letters, asked, distances): int32 `[sequences, residues]`, LETTERS where masked; the letters that are
    masked, -100 elsewhere; classes of distances `[residues, residues]`.
    """

    seed: int
    first: int
    count: int
    num_sequences: int
    num_residues: int

    def __init__(self, seed: int, first: int, count: int, num_sequences: int, num_residues: int) -> None:
        self.seed, self.first, self.count = seed, first, count
        self.num_sequences, self.num_residues = num_sequences, num_residues

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if not -self.count <= index < self.count:
            raise IndexError(f"sample {index} of a data set of {self.count}")
        rng = np.random.default_rng([self.seed, self.first + index % self.count])
        distances = _distances(rng, self.num_residues)
        letters = _letters(rng, _contacts(distances), self.num_sequences, self.num_residues)
        count = max(1, round(MASKED * letters.size))
        places = np.unravel_index(rng.choice(letters.size, count, replace=False), letters.shape)
        asked = np.full_like(letters, _NONE)
        asked[places] = letters[places]
        letters[places] = _MASK
        return letters, asked, np.digitize(distances, EDGES).astype(np.int32)


class Alignments:
    """The data of a run: both splits, the digest a resumed run compares, and what it says of itself."""

    train: AlignmentDataset
    validation: AlignmentDataset
    digest: str
    summary: str

    tokenizer = None
    sampler = RandomSampler

    def __init__(self, config: PretrainConfig) -> None:
        data, model, batch = config.data, config.dimensions, config.train.global_batch
        shape = model.num_sequences, model.num_residues
        validation = max(round(data.alignments * data.validation_fraction), 1)
        self.train = AlignmentDataset(data.seed, 0, data.alignments - validation, *shape)
        self.validation = AlignmentDataset(data.seed, data.alignments - validation, validation, *shape)
        checked = [("training", self.train, "data.alignments")]
        if config.log.validation_interval:
            checked.append(("validation", self.validation, "data.validation_fraction or data.alignments"))
        for name, split, cure in checked:
            if len(split) < batch:
                raise DataError(
                    f"data.alignments={data.alignments}: {len(split)} {name} samples are fewer than "
                    f"train.global_batch={batch}; raise {cure}"
                )
        facts = f"{_FORMAT} {data.seed} {data.alignments} {validation} {shape}"
        self.digest = xxhash.xxh3_128_hexdigest(facts.encode())
        self.summary = f"{data.alignments:,} made-up alignments of {shape[0]} sequences x {shape[1]} residues"

    def shown(self, index: int, marks: Any = None) -> str:
        """A training sample as the model sees it: a line a sequence, ? for what is asked for; marks have no use."""
        letters, asked, _ = self.train[index]
        rows = "\n".join("".join(_NAMES[letter] for letter in row) for row in letters)
        return f"{letters.size} letters, {int((asked != _NONE).sum())} asked for\n{rows}"


def load_alignments(config: PretrainConfig, base: Any = None) -> Alignments:
    """The data of a run. Raises DataError if a split does not fill one batch."""
    return Alignments(config)


def draw_alignments(config: PretrainConfig, steps: int) -> list[tuple[np.ndarray, ...]]:
    """The arrays of a batch for each step: the first samples of the run's seed."""
    rows, model = config.train.global_batch, config.dimensions
    data = AlignmentDataset(config.train.seed, 0, steps * rows, model.num_sequences, model.num_residues)
    samples = [data[i] for i in range(len(data))]
    return [tuple(map(np.stack, zip(*samples[i : i + rows], strict=True))) for i in range(0, len(data), rows)]


def check_letters(batch: Batch, model: ModelConfig, what: str) -> None:
    """Raises DataError naming the sample for arrays that are not of the model's shape, and letters out of range."""
    letters, (asked, distances) = batch.inputs, batch.labels
    shape = (model.num_sequences, model.num_residues)
    ranges = (("letter", letters, 0, LETTERS), ("class of distance", distances, 0, DISTANCE_BINS - 1))
    for name, values, least, most in (*ranges, ("masked letter", np.where(asked == _NONE, 0, asked), 0, _GAP)):
        if values.shape[1:] not in (shape, (shape[1], shape[1])):
            raise DataError(f"{what}: {name}s have shape {list(values.shape[1:])}, the model's are {list(shape)}")
        if values.size and not (values.min() >= least and values.max() <= most):
            row, *at = np.argwhere((values < least) | (values > most))[0]
            value = values[(row, *at)]
            raise DataError(f"{what}: sample {batch.ids[row]} has {name} {value}; there are {least} to {most}")


def _distances(rng: np.random.Generator, residues: int) -> np.ndarray:
    """Distances between all residues of a chain, Angstroms, [residues, residues]."""
    # a ball that the chain fills about as densely as a protein fills its own
    radius = 2.2 * residues**0.38
    at, direction, places = np.zeros(3), _unit(rng.standard_normal(3)), []
    for turn in rng.standard_normal((residues, 3)):
        direction = _unit(direction + 0.6 * turn - at / radius)
        at = at + BOND * direction
        places.append(at)
    chain = np.array(places)
    return np.linalg.norm(chain[:, None] - chain[None], axis=-1)


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def _contacts(distances: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of residues in contact, each residue in one at most."""
    taken: set[int] = set()
    pairs = []
    for flat in np.argsort(distances, axis=None, kind="stable"):
        i, j = map(int, np.unravel_index(flat, distances.shape))
        if distances[i, j] > CONTACT:
            break
        if j - i > 3 and not taken & {i, j}:
            taken |= {i, j}
            pairs.append((i, j))
    return pairs


def _letters(rng: np.random.Generator, pairs: list[tuple[int, int]], sequences: int, residues: int) -> np.ndarray:
    shape = (sequences, residues)
    usual = rng.integers(0, _GAP, residues)
    letters = np.where(rng.random(shape) < CONSERVED, usual, rng.integers(0, _GAP, shape))
    is_coupled = rng.random(shape) < COUPLED
    for i, j in pairs:
        letters[:, j] = np.where(is_coupled[:, j], PARTNER[letters[:, i]], letters[:, j])
    letters[rng.random(shape) < GAPS] = _GAP
    return letters.astype(np.int32)
