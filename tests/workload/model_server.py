"""A model server of the least kind: memory on the GPU, and HTTP that answers with what is in it.

    model_server.py NAME PORT MIB

It calls libcuda.so.1 by the real names through ctypes. POST answers {"model", "digest", "answers"}: the
digest of all its GPU memory, which is its name again and again, and how many requests it has answered.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

NAME, PORT, SIZE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) << 20
cuda = ctypes.CDLL("libcuda.so.1")


def call(function: str, *arguments: object) -> None:
    result = getattr(cuda, function)(*arguments)
    if result:
        raise RuntimeError(f"{function}: {result}")


def weights() -> bytes:
    return (NAME.encode() * (SIZE // len(NAME) + 1))[:SIZE]


class Answer(BaseHTTPRequestHandler):
    answers = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        held = ctypes.create_string_buffer(SIZE)
        call("cuMemcpyDtoH_v2", held, memory, ctypes.c_size_t(SIZE))
        Answer.answers += 1
        digest = hashlib.sha256(held.raw).hexdigest()
        body = json.dumps({"model": NAME, "digest": digest, "answers": Answer.answers}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is logged."""


device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(SIZE))
call("cuMemcpyHtoD_v2", memory, weights(), ctypes.c_size_t(SIZE))
HTTPServer(("127.0.0.1", PORT), Answer).serve_forever()
