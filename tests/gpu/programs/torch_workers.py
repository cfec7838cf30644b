"""A training loop in PyTorch that is fed by a DataLoader's workers: children by fork of a CUDA process.

They inherit every file of the GPU that is open or mapped when the loader starts, and use none. Each batch
says which worker made it and how many that one had made before, so a worker that was replaced, or that has
forgotten, is noticed.
"""

from __future__ import annotations

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic matrix products ask for

import itertools

import ticking
import torch  # type: ignore[import-not-found]
from torch.utils.data import DataLoader, Dataset, get_worker_info  # type: ignore[import-not-found]

WIDTH, BATCH, WORKERS = 1024, 64, 2
FACTOR = 0x9E3779B1 - (1 << 32)

Item = tuple[int, int, int, int, torch.Tensor]


class Rows(Dataset):  # type: ignore[misc]
    """Rows of random numbers, by index. Each worker has a copy, and counts what it was asked for."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> Item:
        """The index, the worker, its PID, the count, the row."""
        self.count += 1
        row = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return index, get_worker_info().id, os.getpid(), self.count, row


class Fed:
    """A model, and the batches that it learns from."""

    def __init__(self, mib: int) -> None:
        torch.manual_seed(7)
        torch.use_deterministic_algorithms(True)
        self.words = torch.arange(mib << 18, dtype=torch.int32, device="cuda") * FACTOR
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
        ).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        loader = DataLoader(
            Rows(),
            batch_size=BATCH,
            sampler=itertools.count(),
            num_workers=WORKERS,
            multiprocessing_context="fork",
            persistent_workers=True,
            pin_memory=True,
        )
        # The workers start here, after CUDA has been used.
        self.batches = iter(loader)
        self.pids: dict[int, int] = {}

    def tick(self, tick: int) -> tuple[bool, str]:
        """One step of training, on the batch that is due from the worker whose turn it is."""
        indices, workers, pids, counts, rows = next(self.batches)
        turn, of_worker = (tick - 1) % WORKERS, (tick - 1) // WORKERS
        good = indices.tolist() == list(range((tick - 1) * BATCH, tick * BATCH))
        good &= workers.tolist() == [turn] * BATCH
        good &= counts.tolist() == list(range(of_worker * BATCH + 1, (of_worker + 1) * BATCH + 1))
        good &= pids.tolist() == [self.pids.setdefault(turn, int(pids[0]))] * BATCH
        given = rows.cuda(non_blocking=True)
        loss = torch.nn.functional.mse_loss(self.model(given), given.flip(1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.words += 1
        expected = torch.arange(len(self.words), dtype=torch.int32, device="cuda") * FACTOR + tick
        good &= bool((self.words == expected).all())
        bits = sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in self.model.parameters())
        return good, f"{bits % (1 << 64):016x},{float(loss.detach()).hex()}"


def main() -> None:
    given = ticking.parser(__doc__).parse_args()
    ticking.run(Fed(given.mib).tick, given)


main()
