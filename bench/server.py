"""The time to the first answer of a model server, started fresh and restored.

    python3 bench/server.py [--layers 32] [--weights disk] [--rounds 3] [--checkpoints 1] [--pauses 2]
        [--settings 'memory.level = 0'] [--folder /var/tmp] [--json server.json] [--svg server.svg]

On a machine with a GPU, the server is a language model with random weights
(tests/gpu/programs/transformers_server.py, needs torch and transformers). With `--weights disk` it reads its
weights from a file in --folder, as a real server does; by default (`--weights made`) it makes them on the GPU
at each start, which needs no file. In the test host the server is gpuwork with --mib of device memory, which
only shows that everything works. In each round, with a warm page cache and with an empty one:

    fresh       from `podman run` to the first answer
    restore     from `gpusnap restore` to the first answer, of a checkpoint in a store in --folder
    command     until `gpusnap restore` returns

A client asks all the time, so an answer may come before the command returns. The first answer is one token;
the model of 32 layers takes 0.1 s for it. After that, outside the measured time, the server is asked for 32
tokens, and each of these answers is compared with the first one. Medians, in seconds. For each of them, the
peak of the RAM that the whole machine uses beyond what it used before (ram.py), in GiB.

The server that is restored is checkpointed --checkpoints times before, each time into an empty store:

    checkpoint  `gpusnap checkpoint`, which ends it
    driver      the driver's checkpoint: its step in that
    write       the step after it in which the GPU memory is written; the JSON has all steps
    blobs       writing the blobs of that checkpoint again, each with fsync, with one thread for each core

With --pauses, the last server is checkpointed so many times with `--leave-running`, while a client asks all
the time: the longest time between two answers is the pause as a client sees it. The server was checkpointed
before, so each of these checkpoints writes only what has changed.

Needs root; installs gpusnap while it runs, and removes what it made.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu"), str(CHECKOUT / "tests" / "integration")]

import ram  # noqa: E402
import shimhost  # noqa: E402
from checkpoint import obstacle  # noqa: E402
from hosts import NAME, BenchError, Place, command, place  # noqa: E402
from podman_gpu import circumstances  # noqa: E402
from restore_floor import COMMAND, Bench, drop_caches  # noqa: E402
from rows import check_settings  # noqa: E402
from servers import PORT, runtimes  # noqa: E402
from support import podman  # noqa: E402

from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402

_PATIENCE = 600.0  # seconds to wait for the first answer
_PAUSE = 0.01
_USUAL = 20  # answers before a pause, for the usual time between two
GIB = 1 << 30
_TOKENS = 32  # in an answer that is compared
_NUMBER = struct.Struct("<Q")
_INSIDE = "/weights"
"""Where the container finds the directory with the weights."""
COLOURS = {"fresh": "#b0b7c3", "restore": "#2a7ae2"}


@dataclass(slots=True)
class Found:
    """Results for one state of the page cache, in seconds, one for each round."""

    cache: str
    fresh: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    command: list[float] = field(default_factory=list)
    ram_fresh: list[int] = field(default_factory=list)
    """The peak of the RAM during a fresh start, in bytes."""
    ram_restore: list[int] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Return the medians in seconds and in bytes of RAM, and how many times faster a restore is."""
        names = ("fresh", "restore", "command", "ram_fresh", "ram_restore")
        figures = {name: statistics.median(getattr(self, name)) for name in names}
        return {**figures, "times": figures["fresh"] / figures["restore"]}


@dataclass(slots=True)
class Pause:
    """A checkpoint with --leave-running, as the command and as a client of the server saw it, in seconds."""

    command: float
    longest: float
    """The longest time between two answers while the command ran."""
    usual: float
    """The median time between two answers before that."""
    refused: int
    """Requests that failed."""
    ram: int
    """The peak of the RAM, in bytes."""


def ask_number(port: int = PORT) -> object:
    """Return the answer of gpuwork. Raises OSError while it does not answer."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(_NUMBER.pack(41))
        return connection.recv(_NUMBER.size)


def ask_model(tokens: int, port: int = PORT) -> object:
    """Return the tokens of the model. Raises OSError while it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        connection.request("GET", f"/{tokens}")
        return json.loads(connection.getresponse().read())
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()


@dataclass(slots=True)
class Server:
    """The server, and its first compared answer."""

    here: Place
    words: list[str]
    ask: Callable[[], object]
    """Asks for the first answer, which is timed."""
    ask_more: Callable[[], object]
    """Asks for an answer that is compared."""
    answer: object = None
    name: str = NAME
    writes: bool = False
    """Whether its first start writes the file of weights."""

    def start(self) -> float:
        """Start the server fresh; return the seconds until its first answer."""
        begun = time.monotonic()
        network = () if "host" in self.here.options else ("--network", "host")
        run = ("run", "-d", "--name", self.name, *self.here.options, *network, self.here.image)
        command("podman", "--runtime", "gpusnap-runtime", *run, *self.words)
        return self.first_answer(begun)

    def restore(self) -> tuple[float, float]:
        """Restore the server; return the seconds until its first answer, and until the command returned.

        Raises BenchError.
        """
        begun = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(command, COMMAND, "restore", self.name)
            answered = self.first_answer(begun, running)
            return answered, running.result()[0]

    def first_answer(self, begun: float, running: Future[tuple[float, str]] | None = None) -> float:
        """Return the seconds from `begun` to the first answer; check a second one. Raises BenchError.

        `running`: the command that brings the server; its error is raised if it fails.
        """
        while time.monotonic() - begun < _PATIENCE:
            if running is not None and running.done():
                running.result()
            try:
                first = self.ask()
            except OSError:
                time.sleep(_PAUSE)
                continue
            took = time.monotonic() - begun
            answer = self.ask_more()
            self.answer = self.answer or answer
            if not first or not answer or answer != self.answer:
                raise BenchError(f"it answered {answer!r} instead of {self.answer!r}")
            return took
        said = podman("logs", self.name)
        raise BenchError(f"no answer in {_PATIENCE:g} s: {(said.out + said.err).strip()[-300:]}")


class Client:
    """Asks without a break, in a thread, and notes when the answers came."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask, self._ended = ask, threading.Event()
        self.answers: list[float] = []
        """The times of the answers, by time.monotonic."""
        self.refused = 0
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                good = bool(self._ask())
            except OSError:
                good = False
            if good:
                self.answers.append(time.monotonic())
            else:
                self.refused += 1
                time.sleep(_PAUSE)

    def wait_for(self, number: int) -> None:
        """Wait for so many more answers. Raises BenchError."""
        wanted, end = len(self.answers) + number, time.monotonic() + _PATIENCE
        while len(self.answers) < wanted:
            if time.monotonic() > end:
                raise BenchError(f"no {number} answers in {_PATIENCE:g} s")
            time.sleep(_PAUSE)


def measure_pause(server: Server) -> Pause:
    """Checkpoint the running server and let it run on, under requests. Raises BenchError."""
    with Client(server.ask) as client:
        client.wait_for(_USUAL)
        usual = [later - one for one, later in pairwise(client.answers)]
        begun, refused = time.monotonic(), client.refused
        with ram.watch() as peak:
            took, _ = command(COMMAND, "checkpoint", "--leave-running", server.name)
        client.wait_for(1)
    first = max(at for at in client.answers if at <= begun)
    gaps = [later - one for one, later in pairwise(at for at in client.answers if at >= first)]
    return Pause(took, max(gaps), statistics.median(usual), client.refused - refused, peak.size)


def of_kind(
    here: Place, options: argparse.Namespace, name: str = NAME, port: int = PORT, *, weights: str = ""
) -> Server:
    """Return a model server with `options.layers`; in the test host, gpuwork with `options.mib`.

    `weights`: the file with them. The first start makes it.
    """
    if here.software:
        words = ["/gpuwork", "--mib", str(options.mib), "--tick", "100", "--serve", str(port)]
        ask = partial(ask_number, port)
        return Server(here, words, ask, ask, name=name)
    program = ["/programs/transformers_server.py", "--port", str(port)]
    words = [sys.executable, *program, "--layers", str(options.layers)]
    if weights:
        words += ["--weights", f"{_INSIDE}/{os.path.basename(weights)}"]
        folder = os.path.dirname(weights)
        here = replace(here, options=(*here.options, "--volume", f"{folder}:{_INSIDE}:bind"))
    return Server(
        here,
        words,
        partial(ask_model, 1, port),
        partial(ask_model, _TOKENS, port),
        name=name,
        writes=bool(weights),
    )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that ended the server; in seconds."""

    command: float
    driver: float
    blobs: float
    stored: int
    """Bytes of the blobs."""
    ram: int
    steps: Mapping[str, float] = field(default_factory=dict)
    """How long each step of gpusnap-runtime took; steps may overlap (docs/format.md, timing)."""


def measure_checkpoints(server: Server, store: Path, count: int) -> list[Checkpoint]:
    """Checkpoint the running server `count` times, each time into an empty store; it has ended then."""
    found, bench = [], Bench(server.here, store, ())
    for number in range(count):
        if number:
            server.restore()
        if store.exists():
            shutil.rmtree(store)
        os.sync()
        with ram.watch() as peak:
            took, _ = command(COMMAND, "checkpoint", NAME)
        steps = {each["step"]: each["seconds"] for each in json.loads(inspect(NAME))["timing"]}
        stored = sum(path.stat().st_size for path in bench.blobs())
        found.append(
            Checkpoint(took, steps["driver checkpoint"], bench.write_alone(), stored, peak.size, steps)
        )
        remove()
        print(found[-1], file=sys.stderr, flush=True)
    return found


def inspect(name: str) -> str:
    """Return what `gpusnap inspect --json` says of a checkpoint."""
    return command(COMMAND, "inspect", "--json", name)[1]


def measure(
    server: Server, store: Path, rounds: int, checkpoints: int, pauses: int
) -> tuple[list[Checkpoint], list[Found], list[Pause]]:
    """Start and restore the server in each round; checkpoint the last one `pauses` times while it runs."""
    every = [Found("warm"), Found("cold")]
    if server.writes:
        server.start()  # it keeps memory that only writing the weights took
        remove()
    server.start()
    ended = measure_checkpoints(server, store, checkpoints)
    # The warm rounds first: what a cold one drops, the next start would read from the disk.
    for found in every:
        for _ in range(rounds):
            for what in ("fresh", "restore"):
                if found.cache == "cold":
                    drop_caches()
                with ram.watch() as peak:
                    if what == "fresh":
                        found.fresh.append(server.start())
                    else:
                        answered, returned = server.restore()
                        found.restore.append(answered)
                        found.command.append(returned)
                (found.ram_fresh if what == "fresh" else found.ram_restore).append(peak.size)
                remove()
            print(f"{found.cache}: {found.row()}", file=sys.stderr, flush=True)
    if pauses:
        server.restore()
    return ended, every, [measure_pause(server) for _ in range(pauses)]


def remove(*names: str) -> None:
    """Remove the container, or those with these names, even if they run."""
    podman("rm", "--force", "--ignore", "--time", "0", *(names or [NAME]))


def table(every: list[Found]) -> str:
    """Return the results as a table for docs/benchmarks.md."""
    lines = [
        "| page cache | fresh | restore | of that, the command | times faster | RAM, fresh | RAM, restore |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in every:
        row = found.row()
        figures = " | ".join(f"{row[name]:.1f} s" for name in ("fresh", "restore", "command"))
        sizes = " | ".join(f"{row[name] / GIB:.2f} GiB" for name in ("ram_fresh", "ram_restore"))
        lines.append(f"| {found.cache} | {figures} | {row['times']:.1f} | {sizes} |")
    return "\n".join(lines)


def table_of_checkpoints(ended: list[Checkpoint]) -> str:
    """Return the checkpoints that ended the server as a table."""
    lines = [
        "| `gpusnap checkpoint` | driver | write, after it | the rest | blobs | GiB stored | RAM |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in ended:
        write = each.steps.get("write", 0.0)
        rest = each.command - each.driver - write
        times = (
            f"{each.command:.2f} s | {each.driver:.2f} s | {write:.2f} s | {rest:.2f} s | {each.blobs:.2f} s"
        )
        lines.append(f"| {times} | {each.stored / GIB:.2f} | {each.ram / GIB:.2f} GiB |")
    return "\n".join(lines)


def table_of_pauses(pauses: list[Pause]) -> str:
    """Return the checkpoints of the running server as a table."""
    lines = [
        "| `gpusnap checkpoint --leave-running` | longest time without an answer | usual | failed | RAM |",
        "|---|---|---|---|---|",
    ]
    for each in pauses:
        times = f"{each.command:.2f} s | {each.longest:.2f} s | {each.usual:.2f} s"
        lines.append(f"| {times} | {each.refused} | {each.ram / GIB:.2f} GiB |")
    return "\n".join(lines)


def picture(every: list[Found], title: str) -> str:
    """Return the results as a bar chart, in SVG."""
    rows = [(found.cache, what, found.row()[what]) for found in every for what in COLOURS]
    scale = 420 / max(seconds for *_, seconds in rows)
    parts = [f'<text x="8" y="20" font-weight="bold">{title}</text>']
    for at, (cache, what, seconds) in enumerate(rows):
        y = 34 + 26 * at
        parts += [
            f'<text x="8" y="{y + 14}">{what}, {cache}</text>',
            f'<rect x="110" y="{y}" width="{seconds * scale:.1f}" height="20" fill="{COLOURS[what]}"/>',
            f'<text x="{116 + seconds * scale:.1f}" y="{y + 14}">{seconds:.1f} s</text>',
        ]
    height = 44 + 26 * len(rows)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{height}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="13">', *parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description="A model server's first answer, fresh and restored.")
    parser.add_argument("--layers", type=int, default=32, help="of the model (32: 12.6 GiB)")
    parser.add_argument("--weights", choices=("made", "disk"), default="made", help="where from (made)")
    parser.add_argument("--mib", type=int, default=200, help="of device memory, in the test host")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoints", type=int, default=1, help="that end the server (1)")
    parser.add_argument("--pauses", type=int, default=2, help="checkpoints of the running server (2)")
    parser.add_argument("--settings", action="append", default=[], help="a line of gpusnap.toml")
    parser.add_argument("--folder", default="/var/tmp", help="where the store goes: on the disk in question")
    parser.add_argument("--json", help="write the figures there too")
    parser.add_argument("--svg", help="write the picture there")
    options = parser.parse_args()
    software = os.environ.get("GPUSNAP_TESTHOST") == "1"
    if reason := obstacle(software=software):
        print(f"server: {reason}", file=sys.stderr)
        return 1
    if not (runtime := next(iter(runtimes()), "")):
        print("server: no CRIU here dumps TCP sockets on this kernel", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        here = stack.enter_context(place(None if software else Nvidia().host().gpus[0].minor))
        about = {**circumstances(Nvidia().host(), "crun"), "software": software, "weights": options.weights}
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(dir=options.folder, prefix="gpusnap-server-")
        )
        text = [f'runtime = "{runtime}"', f'store.path = "{folder}/store"', *options.settings]
        check_settings(text)
        shimhost.write_settings("\n".join(text) + "\n")
        remove()
        stack.callback(remove)
        try:
            weights = ""
            if options.weights == "disk" and not software:
                os.mkdir(f"{folder}/weights")
                weights = f"{folder}/weights/model.safetensors"
            server = of_kind(here, options, weights=weights)
            store = Path(folder, "store")
            ended, every, pauses = measure(
                server, store, options.rounds, max(1, options.checkpoints), options.pauses
            )
        except (BenchError, GpusnapError) as error:
            print(f"server: {error}", file=sys.stderr)
            return 1
    title = f"First answer of a model server on {about['gpu']}"
    if options.json:
        runs = [{"cache": found.cache, **found.row()} for found in every]
        found = {
            **about,
            "checkpoints": [asdict(each) for each in ended],
            "runs": runs,
            "pauses": [asdict(each) for each in pauses],
        }
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    if options.svg:
        Path(options.svg).write_text(picture(every, title))
    print(json.dumps(about, indent=1))
    print(table_of_checkpoints(ended), "", table(every), sep="\n")
    if pauses:
        print("", table_of_pauses(pauses), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
