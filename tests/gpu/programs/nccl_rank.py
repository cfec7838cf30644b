"""A process that uses GPUs beside others: a rank of NCCL's, several GPUs in one, or CUDA IPC.

argv: what to be, and the file to which it writes a line after each tick that came out right.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]

WORDS = 1 << 20


def ticking(tick: Callable[[int], tuple[float, float]]) -> None:
    """Tick for ever; ends at the first wrong sum."""
    with open(sys.argv[2], "w", buffering=1, encoding="ascii") as file:
        number = 0
        while True:
            number += 1
            found, wanted = tick(number)
            if found != wanted:
                sys.exit(f"{found} instead of {wanted}")
            file.write(f"{number}\n")
            time.sleep(0.05)


def rank(backend: str) -> None:
    """All ranks add up their numbers, again and again."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(backend)
    world = dist.get_world_size()
    own = torch.full((WORDS,), float(dist.get_rank() + 1), device="cpu" if backend == "gloo" else device)
    mine = torch.ones(1, device=device)

    def tick(number: int) -> tuple[float, float]:
        words = own * number
        dist.all_reduce(words)
        return float(words[7] * mine.item()), number * world * (world + 1) / 2

    ticking(tick)


def destroyed() -> None:
    """A rank that is done with NCCL, and works on alone."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    words = torch.ones(WORDS, device=device)
    dist.all_reduce(words)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    ticking(lambda number: (float((words * number)[7]), number * 2.0))


def several() -> None:
    """One process, a communicator over all of its GPUs."""
    words = [torch.ones(WORDS, device=f"cuda:{at}") for at in range(torch.cuda.device_count())]

    def tick(number: int) -> tuple[float, float]:
        copies = [each * number for each in words]
        torch.cuda.nccl.all_reduce(copies)
        return float(copies[0][7]), float(number * len(words))

    ticking(tick)


def _import(queue: torch.multiprocessing.Queue, done: bool) -> None:
    words = queue.get()
    while not done:
        time.sleep(0.05)
        words.sum().item()


def ipc(done: bool) -> None:
    """Exports memory to a child by CUDA IPC, which keeps it open, or is `done` with it."""
    torch.multiprocessing.set_start_method("spawn")
    queue = torch.multiprocessing.Queue()
    words = torch.ones(WORDS, device="cuda")
    child = torch.multiprocessing.Process(target=_import, args=(queue, done), daemon=True)
    child.start()
    queue.put(words)
    if done:
        child.join()
    else:
        time.sleep(8)  # the child has no other way to say that it has opened it
    ticking(lambda number: (float((words * number)[7]), float(number)))


if __name__ == "__main__":
    # LATE: variables that the program sets itself, before NCCL begins.
    for each in os.environ.get("LATE", "").split():
        os.environ[each.partition("=")[0]] = each.partition("=")[2]
    KINDS: dict[str, Callable[[], None]] = {
        "nccl": lambda: rank("nccl"),
        "gloo": lambda: rank("gloo"),
        "destroyed": destroyed,
        "several": several,
        "ipc": lambda: ipc(done=False),
        "ipc-done": lambda: ipc(done=True),
    }
    KINDS[sys.argv[1]]()
