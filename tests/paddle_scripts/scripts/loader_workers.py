"""Reads a Dataset of its own with worker processes, collates batches, and counts what each worker saw."""

import numpy as np
import paddle
from paddle.io import BatchSampler, DataLoader, Dataset, get_worker_info


class Squares(Dataset):
    def __init__(self, count):
        self.count = count

    def __getitem__(self, index):
        info = get_worker_info()
        worker = -1 if info is None else info.id
        return np.full((2,), index**2, "float32"), np.array([index], "int64"), np.array(worker, "int64")

    def __len__(self):
        return self.count


def double(batch):
    values, indices, workers = zip(*batch)
    return np.stack(values) * 2, np.concatenate(indices), np.stack(workers)


if __name__ == "__main__":
    data = Squares(10)
    for workers, collate in ((0, None), (2, None), (2, double)):
        sampler = BatchSampler(data, batch_size=4, shuffle=False, drop_last=False)
        total, seen = 0.0, set()
        for values, indices, who in DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=collate):
            values = paddle.to_tensor(values)
            total += float(values.sum())
            seen |= set(np.asarray(who).ravel().tolist())
            print(list(values.shape), np.asarray(indices).ravel().tolist())
        print(workers, "workers", sorted(seen), "sum", total)
