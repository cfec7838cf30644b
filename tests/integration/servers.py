"""Clients of a server: so many new connections a second, and some that stay open; what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import ge
from pathlib import Path
from types import TracebackType

from support import Container, good, podman, run, until

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.preflight import sockets

PORT = 8077

NUMBER = struct.Struct("<Q")
# Seconds: a connection that gets no answer for so long counts as lost.
PATIENCE = 60.0
# At once; above that no new ones are begun until some are over.
MOST = 2000


def outcome(error: BaseException) -> str:
    """What a client saw, in a word."""
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "reset"
    if isinstance(error, asyncio.IncompleteReadError):
        return "closed"
    return "unreachable" if isinstance(error, OSError) else type(error).__name__


class Clients:
    """A context in which clients are at work, in a thread of their own.

    `short` counts what became of the connections that asked once; `held` those that asked all the time.
    """

    def __init__(self, address: str, port: int, *, rate: int = 100, held: int = 4) -> None:
        self.short: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.answers = [0] * held
        """By connection that stays open."""
        self._where = (address, port)
        self._rate = rate
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), daemon=True)

    def answered(self) -> int:
        """How many new connections have had their answer."""
        return self.short["ok"]

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(NUMBER.pack(number))
        (found,) = NUMBER.unpack(await asyncio.wait_for(reader.readexactly(NUMBER.size), PATIENCE))
        if found != number + 1:
            raise AssertionError(f"{number} was answered with {found}")

    async def _once(self, number: int) -> None:
        writer = None
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(*self._where), PATIENCE)
            await self._ask(reader, writer, number)
            self.short["ok"] += 1
        except (TimeoutError, OSError, EOFError, AssertionError) as error:
            self.short[outcome(error)] += 1
        finally:
            if writer is not None:
                writer.close()

    async def _hold(self, which: int) -> None:
        """A connection that stays open; when it is lost, another."""
        number = 0
        while not self._end.is_set():
            writer = None
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(*self._where), PATIENCE)
                while not self._end.is_set():
                    number += 1
                    await self._ask(reader, writer, number)
                    self.held["answers"] += 1
                    self.answers[which] += 1
                    await asyncio.sleep(0.02)
            except (TimeoutError, OSError, EOFError, AssertionError) as error:
                # Before the connection was there it is one of the new ones.
                self.held[outcome(error) if writer is not None else "not connected"] += 1
                await asyncio.sleep(0.05)
            finally:
                if writer is not None:
                    writer.close()

    async def _work(self) -> None:
        holders = [asyncio.create_task(self._hold(which)) for which in range(len(self.answers))]
        tasks: set[asyncio.Task[None]] = set()
        begun, number = time.monotonic(), 0
        while not self._end.is_set():
            due = int((time.monotonic() - begun) * self._rate)
            # After a pause of this process: what was missed is not made up for.
            number = max(number, due - self._rate)
            while number < due and len(tasks) < MOST:
                number += 1
                task = asyncio.create_task(self._once(number))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.01)
        for task in (*tasks, *holders):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, *holders, return_exceptions=True)

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(PATIENCE)


@dataclass
class Server:
    """A container of gpuwork that answers on a port."""

    container: Container
    address: str
    network: str
    port: int = PORT

    @classmethod
    def start(cls, name: str, *, network: str, options: Sequence[str] = ()) -> Server:
        """`network`: host, or bridge; returns when it has ticked twice."""
        words = ("--mib", "8", "--serve", str(PORT))
        container = Container.start(name, *words, options=["--network", network, *options])
        return cls(container, _address(container, network), network)

    def again(self) -> Server:
        """The same from its start, after a failure."""
        self.container.remove()
        return Server.start(self.container.name, network=self.network)

    def round(self, *, leave_running: bool, established: bool) -> None:
        """A checkpoint; of one that ends, its restore as well."""
        tcp = ["--tcp-established"] if established else []
        if leave_running:
            with tempfile.TemporaryDirectory() as folder:
                good(run(*self.container.line(Path(folder), "--leave-running", *tcp)))
        else:
            good(podman("container", "checkpoint", *tcp, self.container.name))
            good(podman("container", "restore", *tcp, self.container.name))

    def dead(self) -> int:
        """How many sockets its process has open that are closed connections."""
        pid = self.container.pid
        open_ones = {each.inode for each in sockets.connections(pid)}
        process = proc.process(pid)
        assert process is not None
        listening = 1
        found = [each for each in sockets.iterate_open([process]) if each.inode not in open_ones]
        return len(found) - listening

    def wait_for_answers(self, clients: Clients, more: int = 5) -> None:
        """New connections are answered."""
        wanted = clients.answered() + more
        until(lambda: clients.answered() >= wanted, f"answers to new connections: {clients.short}")

    def wait_for_held(self, clients: Clients, more: int = 2) -> None:
        """Each connection that stays open is answered."""
        wanted = [count + more for count in clients.answers]
        until(lambda: all(map(ge, clients.answers, wanted)), f"answers to old connections: {clients.held}")


def _address(container: Container, network: str) -> str:
    if network == "host":
        return "127.0.0.1"
    networks = container.inspect()["NetworkSettings"]["Networks"]
    return str(next(iter(networks.values()))["IPAddress"])


def runtimes() -> list[str]:
    """crun and runc whose CRIU can dump sockets on this kernel: the host's own, or the next releases."""
    if not sockets.is_restricted_by_kernel() or _version() >= (4, 2):
        return ["crun", "runc"]
    newer = [f"/opt/newer/bin/{name}" for name in ("crun", "runc")]
    return [path for path in newer if os.path.exists(path) and run(path, "--version").code == 0]


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", run("criu", "--version").out)[:2]))
