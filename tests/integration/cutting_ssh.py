"""In the place of ssh: a way to the other host that breaks at a chosen frame. Run by otherhost's program.

    cutting_ssh.py PLAN -- COMMAND…

PLAN is a file: SIDE WHAT NUMBER ACTION, such as "to fetch 2 kill". At the NUMBERth frame of that kind, to the
other host (a request) or from it (the answer to one), and only in the first connection:

    kill      the gpusnap there is killed before the frame goes on
    cut       the connection ends before the frame goes on
    working   the frame goes on, and the gpusnap there is killed once its Podman works
    sender    the gpusnap here is killed before the frame goes on
    sigint    the gpusnap here gets SIGINT, and the frame goes on
    garble    the frame goes on with a wrong byte at its end
    pause     the frame goes on once the connection has ended otherwise; PLAN.paused says that it waits
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

MAGIC = b"gpusnap-migrate 1\n"


class Way:
    """Two directions, and what shall happen on them."""

    def __init__(self, plan: Path, child: subprocess.Popen[bytes]) -> None:
        words = plan.read_text().split() if plan.exists() else []
        self.side, self.what, number, self.action = words or ("", "", "0", "")
        self.number = int(number)
        plan.unlink(missing_ok=True)
        self.paused = plan.with_name(f"{plan.name}.paused")
        self.child = child
        self.asked = ""

    def relay(self, side: str, source: BinaryIO, sink: BinaryIO) -> None:
        try:
            if side == "from":
                sink.write(source.read(len(MAGIC)))
            while head := source.read(4):
                data = source.read(int.from_bytes(head, "big"))
                frame = json.loads(data)
                payload = source.read(frame.get("payload", 0))
                if self.is_meant(side, frame):
                    data, payload = self.act(data, payload, sink)
                sink.write(head + data + payload)
        except (OSError, ValueError):
            pass
        finally:
            sink.close()

    def is_meant(self, side: str, frame: dict[str, object]) -> bool:
        if side == "to" and "ask" in frame:
            self.asked = str(frame["ask"])
        kinds = [self.asked] if side == "from" and "ok" in frame else []
        kinds += [str(frame["ask"])] if "ask" in frame else []
        kinds += ["blob"] if "blob" in frame else []
        if side != self.side or self.what not in kinds:
            return False
        self.number -= 1
        return self.number == 0

    def act(self, data: bytes, payload: bytes, sink: BinaryIO) -> tuple[bytes, bytes]:
        match self.action:
            case "kill":
                self.child.kill()
            case "cut":
                os._exit(255)
            case "sender":
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(255)
            case "sigint":
                os.kill(os.getppid(), signal.SIGINT)
            case "garble":
                payload = payload[:-1] + bytes([payload[-1] ^ 1])
            case "pause":
                self.paused.touch()
                self.child.wait()
            case "working":
                sink.write(len(data).to_bytes(4, "big") + data)
                sink.flush()
                self.kill_at_work()
                os._exit(255)
        return data, payload

    def kill_at_work(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for each in Path("/proc").glob("[0-9]*"):
                try:
                    mark = b"GPUSNAP_MIGRATION=" in (each / "environ").read_bytes()
                    if mark and (each / "comm").read_text() == "podman\n":
                        self.child.kill()
                        return
                except OSError:
                    continue


def main() -> None:
    with subprocess.Popen(sys.argv[3:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        way = Way(Path(sys.argv[1]), child)
        to = threading.Thread(target=way.relay, args=("to", sys.stdin.buffer, child.stdin), daemon=True)
        to.start()
        way.relay("from", os.fdopen(child.stdout.fileno(), "rb", closefd=False), os.fdopen(1, "wb", 0))
        to.join(1)
        os._exit(child.wait(90) & 0xFF)


if __name__ == "__main__":
    main()
