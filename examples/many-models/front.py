"""An HTTP front for several model servers that share one GPU.

A request names a model, as OpenAI's API has it: {"model": "llama", ...}. Its server is resumed if it is
suspended; if the GPU has no room, the server that was idle longest is suspended for it (`gpusnap swap`). A
server with a request under way is never suspended: then the request waits, for WAIT seconds at most.

    python front.py models.toml --port 8000

An example to start from: no authentication, and it changes the GPU for each request for another model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

GPUSNAP = "gpusnap"
WAIT = 120.0
"""Seconds that a request may wait for its model."""
NO_ROOM = "GPS-401"
"""What gpusnap says where no GPU has room; `gpusnap explain GPS-401`."""
# Of one connection only (RFC 9110, 7.6.1), and what httpx sets itself.
NOT_FORWARDED = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "host", "content-length"}


class Unavailable(Exception):
    """The model cannot be used now; the message says why."""


@dataclass
class Model:
    """A model server: its container, and where it answers."""

    name: str
    container: str
    url: str
    running: bool = False
    requests: int = 0
    """Under way now."""
    used: float = 0.0
    """When its last request ended."""


class Models:
    """Which models are on the GPU, and who waits for one."""

    def __init__(self, models: dict[str, Model]) -> None:
        self.all = models
        self._moving = asyncio.Lock()
        self._idle = asyncio.Event()

    async def look(self) -> None:
        """Ask gpusnap which of them run; the others are suspended."""
        _, out, _ = await gpusnap("ps", "--json")
        states = {each["name"]: each["state"] for each in json.loads(out)["containers"]}
        for model in self.all.values():
            model.running = states.get(model.container) == "running"

    @contextlib.asynccontextmanager
    async def using(self, model: Model) -> AsyncIterator[None]:
        """Have the model on the GPU while the block runs. Raises Unavailable."""
        deadline = time.monotonic() + WAIT
        while True:
            async with asyncio.timeout(WAIT), self._moving:
                if model.running or await self._bring(model):
                    model.requests += 1
                    break
                self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise Unavailable("all GPUs are busy with other models; try again") from None
        try:
            yield
        finally:
            model.requests -= 1
            model.used = time.monotonic()
            self._idle.set()

    async def _bring(self, model: Model) -> bool:
        """Resume it, in the place of another one if need be; False where all others are at work."""
        code, _, said = await gpusnap("resume", model.container)
        if code and NO_ROOM not in said:
            raise Unavailable(said)
        if code:
            idle = [each for each in self.all.values() if each.running and not each.requests]
            if not idle:
                return False
            out = min(idle, key=lambda each: each.used)
            code, _, said = await gpusnap("swap", out.container, model.container)
            await self.look()
            if code:
                raise Unavailable(said)
        model.running = True
        return True


async def gpusnap(*words: str) -> tuple[int, str, str]:
    """Run gpusnap to its end; exit code, output, and what it said. It has deadlines of its own."""
    child = await asyncio.create_subprocess_exec(
        GPUSNAP,
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, said = await child.communicate()
    return child.returncode or 0, out.decode(), said.decode(errors="replace").strip()


def read(path: Path) -> dict[str, Model]:
    """The models of a configuration file."""
    tables = tomllib.loads(path.read_text("utf-8"))["models"]
    return {name: Model(name, table["container"], table["url"]) for name, table in tables.items()}


def application(models: Models) -> Starlette:
    """The front as an ASGI application."""
    client = httpx.AsyncClient(timeout=httpx.Timeout(WAIT, connect=10.0))

    async def listed(_: Request) -> Response:
        rows = [{"id": each.name, "object": "model", "running": each.running} for each in models.all.values()]
        return JSONResponse({"object": "list", "data": rows})

    async def forward(request: Request) -> Response:
        body = await request.body()
        try:
            name = json.loads(body)["model"]
            model = models.all[name]
        except (ValueError, TypeError):
            return _error(400, "the request is no JSON object that names a model")
        except KeyError as error:
            return _error(404, f"there is no model {error}; GET /v1/models lists them")
        stack = contextlib.AsyncExitStack()
        try:
            await stack.enter_async_context(models.using(model))
            headers = {k: v for k, v in request.headers.items() if k.lower() not in NOT_FORWARDED}
            wanted = client.build_request("POST", model.url + request.url.path, content=body, headers=headers)
            answer = await client.send(wanted, stream=True)
            stack.push_async_callback(answer.aclose)
        except (Unavailable, TimeoutError) as error:
            await stack.aclose()
            return _error(503, str(error) or "the model did not come in time")
        except httpx.HTTPError as error:
            await stack.aclose()
            return _error(502, f"the server of {model.name} does not answer: {error}")
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in NOT_FORWARDED}

        async def parts() -> AsyncIterator[bytes]:
            async with stack:  # the model stays on the GPU until the last byte has gone, or the client has
                async for part in answer.aiter_raw():
                    yield part

        return StreamingResponse(parts(), answer.status_code, headers=kept)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await models.look()
        async with client:
            yield

    routes = [Route("/v1/models", listed), Route("/v1/{rest:path}", forward, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve several models that share one GPU.")
    parser.add_argument("models", type=Path, help="the configuration file, such as models.toml")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(application(Models(read(options.models))), host=options.host, port=options.port)


if __name__ == "__main__":
    main()
