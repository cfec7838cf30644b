"""A training loop in PyTorch, repeatable to the bit, beside a block of memory of which every word is checked.

Model, gradients and Adam's state take about 0.3 GiB, the block what --mib says.
"""

from __future__ import annotations

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic matrix products ask for

import ticking
import torch  # type: ignore[import-not-found]

WIDTH, LAYERS, BATCH = 2048, 4, 256
PIECE = 16 << 20  # words of the block that are looked at together
FACTOR = 0x9E3779B1 - (1 << 32)


def wrapped(number: int) -> int:
    """As a signed word of 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


class Block:
    """Words that look random; each tick adds one to all of them."""

    def __init__(self, mib: int, device: str) -> None:
        self.pieces = [
            torch.empty(min(PIECE, (mib << 18) - at), dtype=torch.int32, device=device)
            for at in range(0, mib << 18, PIECE)
        ]
        self.base = torch.arange(PIECE, dtype=torch.int32, device=device) * FACTOR
        self.base ^= self.base >> 15
        self.base *= FACTOR
        self.base ^= self.base >> 13
        for number, piece in enumerate(self.pieces):
            piece.copy_(self._first(number, piece))

    def _first(self, number: int, piece: torch.Tensor) -> torch.Tensor:
        return self.base[: len(piece)] + wrapped(number * FACTOR)

    def tick(self, tick: int) -> bool:
        wrong = torch.zeros((), dtype=torch.int64, device=self.base.device)
        for number, piece in enumerate(self.pieces):
            piece.add_(1)
            wrong += (piece - self._first(number, piece) != tick).sum()
        return int(wrong.item()) == 0


class Training:
    """A perceptron that learns to turn its input around, on fresh random data each tick."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(7)
        torch.use_deterministic_algorithms(True)
        layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
        self.model = torch.nn.Sequential(*layers[:-1]).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.random = torch.Generator(device=device).manual_seed(11)
        self.device = device

    def tick(self) -> str:
        given = torch.randn(BATCH, WIDTH, device=self.device, generator=self.random)
        loss = torch.nn.functional.mse_loss(self.model(given), given.flip(1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        bits = sum(int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in self.model.parameters())
        return f"{bits % (1 << 64):016x},{float(loss.detach()).hex()}"


def main() -> None:
    options = ticking.parser(__doc__)
    options.add_argument("--device", default="cuda")
    given = options.parse_args()
    block, training = Block(given.mib, given.device), Training(given.device)
    ticking.run(lambda tick: (block.tick(tick), training.tick()), given)


main()
