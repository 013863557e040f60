"""Copies of transposed matrices, as published weights are read and written: numpy's, and that of core.devices.transfer.

    python benchmarks/transposed_copy.py

prints GB/s of processor time, the best of some rounds in turns.
"""

import time

import ml_dtypes
import numpy as np

from polyreme.core.devices.transfer import aligned_copy

SHAPES = ((576, 576), (1536, 576), (3072, 768), (2048, 5632), (4096, 4096), (11008, 4096))
ROUNDS = 4


def main() -> None:
    """Measure and print."""
    print("| matrix that is read | dtype | numpy, GB/s | by columns, GB/s | ratio |\n|---|---|---|---|---|")
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for shape in SHAPES:
            view = np.ones(shape, dtype).T
            copies = {"numpy": lambda view=view: view.copy(order="C"), "columns": lambda view=view: aligned_copy(view)}
            least = dict.fromkeys(copies, float("inf"))
            repeats = max(1, 2**24 // view.nbytes)
            for _ in range(ROUNDS):
                for name, copy in copies.items():
                    start = time.process_time()
                    for _ in range(repeats):
                        copy()
                    least[name] = min(least[name], (time.process_time() - start) / repeats)
            speeds = [view.nbytes / seconds / 1e9 for seconds in least.values()]
            name = f"{shape[0]} x {shape[1]} | {np.dtype(dtype).name}"
            print(f"| {name} | {speeds[0]:.2f} | {speeds[1]:.2f} | {speeds[1] / speeds[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
