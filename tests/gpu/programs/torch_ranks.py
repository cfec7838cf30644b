"""A training loop in PyTorch over several GPUs: DistributedDataParallel, a process each, as of torchrun.

Each step the ranks add up their gradients, and numbers whose sum is known. A tick is so many steps, of which
nothing waits for the GPU before the last one has been queued: with --pause 0 the GPUs are never idle.
"""

from __future__ import annotations

import os
import subprocess
import sys

import ticking

WIDTH, BATCH, WORDS = 512, 64, 1 << 16
FACTOR = 0x9E3779B1 - (1 << 32)
PORT = "29517"


def launch(ranks: int) -> int:
    """Start the ranks, which have this line's options, and wait for them; this process has no CUDA."""
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
    started = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    return max(abs(process.wait()) for process in started)


class Rank:
    """One rank's model, and its words in device memory."""

    def __init__(self, mib: int, steps: int) -> None:
        import torch  # type: ignore[import-not-found]
        import torch.distributed as dist  # type: ignore[import-not-found]

        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl")
        torch.manual_seed(7)
        self.torch, self.dist, self.steps = torch, dist, steps
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.words = torch.arange(mib << 18, dtype=torch.int32, device=self.device) * FACTOR
        model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
        )
        self.model = torch.nn.parallel.DistributedDataParallel(
            model.to(self.device), device_ids=[self.device.index]
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.given = torch.randn(BATCH, WIDTH, device=self.device) + self.rank
        self.own = torch.full((WORDS,), self.rank + 1, dtype=torch.int64, device=self.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)

    def step(self, number: int) -> None:
        """Queue one step of training, and the sum of all ranks' numbers."""
        loss = self.torch.nn.functional.mse_loss(self.model(self.given), self.given.flip(1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        numbers = self.own * number
        self.dist.all_reduce(numbers)
        self.wrong += (numbers != number * self.world * (self.world + 1) // 2).sum()
        self.words += 1

    def tick(self, tick: int) -> tuple[bool, str]:
        """So many steps; the checksum is that of the model, which all ranks have the same."""
        for number in range((tick - 1) * self.steps + 1, tick * self.steps + 1):
            self.step(number)
        torch = self.torch
        expected = torch.arange(len(self.words), dtype=torch.int32, device=self.device) * FACTOR
        good = int(self.wrong) == 0 and bool((self.words == expected + tick * self.steps).all())
        bits = sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in self.model.parameters())
        return good, f"{bits % (1 << 64):016x}"


def main() -> int:
    options = ticking.parser(__doc__)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--steps", type=int, default=1, help="steps that one tick queues")
    given = options.parse_args()
    if "RANK" not in os.environ:
        return launch(given.ranks)
    ticking.run(Rank(given.mib, given.steps).tick, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
