"""Batches of 4.8 MB through 2 worker processes: polyreme's DataLoader against a queue of pickled arrays.

Both sides hand over the same finished array again and again, so that moving a batch is all that is measured; both end
with the batch as a private array in the parent (ours as a Tensor). Rounds alternate; medians are printed, in MB/s
(10^6 bytes).

    python benchmarks/dataloader.py [--rounds 7] [--batches 100]
"""

import argparse
import multiprocessing
import statistics
import time

import numpy as np

from polyreme.io import DataLoader, Dataset

SHAPE = (32, 3, 112, 112)  # 4.8 MB of float32
WORKERS = 2


class Ready(Dataset):
    """Batches that cost nothing to make."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.made: np.ndarray | None = None

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> np.ndarray:
        if self.made is None:
            self.made = np.random.default_rng(0).random(SHAPE, "float32")
        return self.made


def produce(queue, batches: int) -> None:
    """The baseline's worker: put pickled batches."""
    dataset = Ready(batches)
    for index in range(batches):
        queue.put(dataset[index])
    queue.close()
    queue.join_thread()


def ours(loader: DataLoader) -> float:
    """Seconds for one epoch, workers already running."""
    running = iter(loader)
    next(running)
    start = time.perf_counter()
    count = sum(1 for _ in running)
    return (time.perf_counter() - start) / count


def baseline(batches: int) -> float:
    """Seconds per batch through one multiprocessing.Queue, from the first arrival on."""
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue(maxsize=2 * WORKERS)
    workers = [context.Process(target=produce, args=(queue, batches // WORKERS)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    count = batches // WORKERS * WORKERS
    queue.get()
    start = time.perf_counter()
    for _ in range(count - 1):
        queue.get()
    seconds = (time.perf_counter() - start) / (count - 1)
    for worker in workers:
        worker.join()
    return seconds


def main() -> None:
    """Run both sides in turn and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=100)
    arguments = parser.parse_args()
    loader = DataLoader(
        Ready(arguments.batches), batch_size=None, num_workers=WORKERS, persistent_workers=True, prefetch_factor=2
    )
    megabytes = int(np.prod(SHAPE)) * 4 / 1e6
    sides: dict[str, list[float]] = {"polyreme DataLoader": [], "pickled queue": []}
    ours(loader)  # starts the workers and maps the shared memory
    for _ in range(arguments.rounds):
        sides["polyreme DataLoader"].append(megabytes / ours(loader))
        sides["pickled queue"].append(megabytes / baseline(arguments.batches))
    for name, rates in sides.items():
        print(f"{name:20} {statistics.median(rates):8.0f} MB/s  (rounds {min(rates):.0f} to {max(rates):.0f})")
    ours_median, queue_median = (statistics.median(rates) for rates in sides.values())
    print(f"ratio {ours_median / queue_median:.1f}  ({megabytes:.1f} MB batches, {WORKERS} workers)")


if __name__ == "__main__":
    main()
