"""Device memory that stays as it is from tick to tick, for those who time checkpoints of it, in PyTorch.

One block of --mib, divided among --procs processes, of random words, zeros or bf16 weights. A tick adds one
to the first 2 MiB alone, and checks those and a sixteenth of the rest, in turn. SIGUSR1 gives about 5 % of it
other words, in runs of whole pieces.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import TYPE_CHECKING

import ticking

if TYPE_CHECKING:
    import torch  # type: ignore[import-not-found]

PIECE = 4 << 20  # words: small beside the block, since what a check leaves in memory differs at each tick
TOUCHED = 512 << 10  # words: 2 MiB
SLICES = 16
FACTOR = 0x9E3779B1 - (1 << 32)
KINDS = ["random", "zero", "bf16"]
DEVIATION = 0.02  # of a layer's weights


def launch(processes: int) -> None:
    """Be a launcher without CUDA, and end when the first worker fails."""
    words = [sys.executable, *sys.argv, "--procs", "1", "--of", str(processes), "--rank"]
    workers = [subprocess.Popen([*words, str(rank)]) for rank in range(processes)]
    for _ in workers:
        if os.wait()[1]:
            raise SystemExit(1)


class Block:
    """The memory; `rank` sets one process' words apart from another's."""

    def __init__(self, mib: int, kind: str, rank: int) -> None:
        import torch  # here, because it is slow, and a launcher needs none

        self.torch, self.kind, self.rank = torch, kind, rank
        self.words = torch.empty(mib << 18, dtype=torch.int32, device="cuda")
        self.pieces = -(-len(self.words) // PIECE)
        self.base = torch.arange(PIECE, dtype=torch.int32, device="cuda") * FACTOR
        self.base ^= self.base >> 15
        self.base *= FACTOR
        self.base ^= self.base >> 13
        self.generator = torch.Generator(device="cuda")
        self.asked = self.made = 0
        for number in range(self.pieces):
            self._piece(number).copy_(self._first(number))
        signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked += 1

    def _piece(self, number: int) -> torch.Tensor:
        return self.words[number * PIECE : (number + 1) * PIECE]

    def _changed(self, number: int) -> bool:
        """Whether SIGUSR1 changes a piece: eight runs of them, or single ones where there are few."""
        period = max(20, self.pieces // 8)
        return number > 0 and number % period >= period - (period + 10) // 20

    def _first(self, number: int) -> torch.Tensor:
        """What a piece holds but for the ticks."""
        size, change = len(self._piece(number)), self.made if self._changed(number) else 0
        if self.kind == "zero":
            return self.torch.full((size,), change, dtype=self.torch.int32, device="cuda")
        if self.kind == "random":
            spread = (self.rank << 24 | change << 16 | number) * FACTOR
            return self.base[:size] + ((spread + (1 << 31)) % (1 << 32) - (1 << 31))
        self.generator.manual_seed(self.rank << 40 | change << 32 | number)
        weights = self.torch.empty(2 * size, dtype=self.torch.bfloat16, device="cuda")
        return weights.normal_(0, DEVIATION, generator=self.generator).view(self.torch.int32)

    def tick(self, tick: int) -> tuple[bool, str]:
        """Change what was asked for, touch, and check."""
        if self.made < self.asked:
            self.made = self.asked
            for number in filter(self._changed, range(self.pieces)):
                self._piece(number).copy_(self._first(number))
        self.words[:TOUCHED].add_(1)
        wrong = self.torch.zeros((), dtype=self.torch.int64, device="cuda")
        for number in {0, *range(tick % SLICES, self.pieces, SLICES)}:
            expected = self._first(number)
            if number == 0:
                expected[:TOUCHED] += tick
            wrong += (self._piece(number) != expected).sum()
        return int(wrong.item()) == 0, f"{wrong.item()} changes={self.made}"


def main() -> None:
    options = ticking.parser(__doc__)
    options.add_argument("--data", choices=KINDS, default="random", help="what the block holds")
    options.add_argument("--procs", type=int, default=1, help="processes that share the block")
    options.add_argument("--of", type=int, default=1, help=argparse.SUPPRESS)
    options.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.procs > 1:
        launch(given.procs)
    else:
        ticking.run(Block(given.mib // given.of, given.data, given.rank).tick, given)


main()
