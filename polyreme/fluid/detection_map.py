"""Mean average precision of detections: what counts as right, and precisions over recalls."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np

from polyreme.errors import ConfigError
from polyreme.ops.detection.boxes import overlaps
from polyreme.ops.detection.proposals import descending

VERSIONS = ("integral", "11point")


class PrecisionCounts:
    """How many objects of each class there are, and of each detection its score and whether it is right.

    Source: Everingham et al., 2010, "The PASCAL Visual Object Classes (VOC) Challenge", section 4.2.
    """

    def __init__(self) -> None:
        self._objects: Counter[int] = Counter()
        self._scores: defaultdict[int, list[float]] = defaultdict(list)
        self._hits: defaultdict[int, list[bool]] = defaultdict(list)

    def add(
        self, rows: np.ndarray, labels: np.ndarray, boxes: np.ndarray, is_difficult: np.ndarray, threshold: float,
        evaluate_difficult: bool,
    ) -> None:  # fmt: skip
        """An image: rows (class, score, x1, y1, x2, y2) [k, 6], fractions of it; labels, boxes and is_difficult of its
        objects. Of detections in order of their scores the first that overlaps an object most, by more than threshold,
        is right. Difficult objects count only if evaluate_difficult.
        """
        counts = np.ones(len(labels), bool) if evaluate_difficult else ~is_difficult
        self._objects.update(labels[counts].tolist())
        taken = np.zeros(len(labels), bool)
        for row in rows[descending(rows[:, 1])]:
            label = int(row[0])
            same = np.flatnonzero(labels == label)
            near = overlaps(np.clip(row[2:], 0, 1), boxes[same]) if len(same) else np.zeros(1)
            best = same[near.argmax()] if near.max() > threshold else None
            if best is not None and not counts[best]:
                continue
            self._scores[label].append(float(row[1]))
            self._hits[label].append(best is not None and not taken[best])
            if best is not None:
                taken[best] = True

    def mean_average_precision(self, version: str, background: int) -> float:
        """The mean of the average precision of each class that has objects; 0 if none has."""
        every = [
            self._average(label, count, version)
            for label, count in self._objects.items()
            if label != background and count
        ]
        return float(np.mean(every)) if every else 0.0

    def _average(self, label: int, count: int, version: str) -> float:
        order = descending(np.array(self._scores[label]))
        hits = np.cumsum(np.array(self._hits[label], float)[order])
        if not len(hits):
            return 0.0
        precision, recall = hits / np.arange(1, len(hits) + 1), hits / count
        if version == "11point":
            return float(np.mean([precision[recall >= least].max(initial=0.0) for least in np.linspace(0, 1, 11)]))
        return float(sum(p * (b - a) for p, (a, b) in zip(precision, pairwise([0.0, *recall]), strict=True)))


def check_version(version: str) -> None:
    """Raises ConfigError for what is no way to average precisions."""
    if version not in VERSIONS:
        raise ConfigError(f"DetectionMAP: ap_version={version!r}; it is one of {', '.join(VERSIONS)}")


__all__ = ["PrecisionCounts", "check_version"]
