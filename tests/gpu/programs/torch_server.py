"""A model server in PyTorch: a layer of a network on the GPU answers TCP connections, a thread for each.

A client sends a number of 8 bytes (little endian) and gets the next one, as often as it likes, if the layer's
output is what it always was, to the bit; else it gets 0. Beside it a block of memory of --mib is checked word
by word at each tick.
"""

from __future__ import annotations

import os

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic matrix products ask for

import socketserver
import struct
import threading

import ticking
import torch  # type: ignore[import-not-found]

WIDTH, BATCH = 1024, 16
FACTOR = 0x9E3779B1 - (1 << 32)
NUMBER = struct.Struct("<Q")


class Model:
    """The layer, and what it makes of one input."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        torch.use_deterministic_algorithms(True)
        self.layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()).to("cuda")
        self.given = torch.randn(BATCH, WIDTH, device="cuda")
        self.expected = self.forward()

    def forward(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.layer(self.given)

    def next_number(self, number: int) -> int:
        """The next number, computed on the GPU from the layer's output."""
        right = (self.forward().view(torch.int32) == self.expected.view(torch.int32)).all()
        return int(torch.where(right, torch.full((), number + 1, device="cuda"), 0))


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, model: Model) -> None:
        super().__init__(("", port), Answers)
        self.model = model


class Answers(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        try:
            while len(given := self.rfile.read(NUMBER.size)) == NUMBER.size:
                (number,) = NUMBER.unpack(given)
                self.wfile.write(NUMBER.pack(self.server.model.next_number(number)))
        except OSError:  # the client has gone, or a restore has closed the connection
            pass


class Block:
    """Words of device memory; each tick adds one to all of them."""

    def __init__(self, mib: int) -> None:
        self.words = torch.arange(mib << 18, dtype=torch.int32, device="cuda") * FACTOR

    def tick(self, tick: int) -> tuple[bool, str]:
        self.words += 1
        expected = torch.arange(len(self.words), dtype=torch.int32, device="cuda") * FACTOR
        return bool((self.words == expected + tick).all()), "0"


def main() -> None:
    options = ticking.parser(__doc__)
    options.add_argument("--port", type=int, required=True)
    given = options.parse_args()
    model, block = Model(), Block(given.mib)
    threading.Thread(target=Server(given.port, model).serve_forever, daemon=True).start()
    ticking.run(block.tick, given)


main()
