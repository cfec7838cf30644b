"""A language model with random weights behind HTTP: GET /N answers with the next N tokens, as JSON.

Llama-shaped, in bf16, from one seed; the prompt is always the same, and so are the tokens. With --weights,
they are read from that file, as a real server does; if there is no such file, it is written first.
"""

from __future__ import annotations

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import safetensors.torch  # type: ignore[import-not-found]
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

PROMPT = list(range(1, 17))


class Server(ThreadingHTTPServer):
    """The model, and what it says."""

    daemon_threads = True

    def __init__(self, port: int, layers: int, weights: str) -> None:
        torch.manual_seed(7)
        torch.set_default_dtype(torch.bfloat16)
        config = transformers.LlamaConfig(num_hidden_layers=layers)
        if weights and not os.path.exists(weights):
            with torch.device("cuda"):
                made = transformers.LlamaForCausalLM(config)
            safetensors.torch.save_model(made, weights)
            del made
            torch.cuda.empty_cache()
        with torch.device("cuda"):
            self.model = transformers.LlamaForCausalLM(config).eval()
        if weights:
            safetensors.torch.load_model(self.model, weights, device="cuda")
            torch.cuda.empty_cache()  # the loader's copy, which PyTorch would keep
        super().__init__(("", port), Answers)

    def tokens(self, count: int) -> list[int]:
        """The next ones."""
        given = torch.tensor([PROMPT], device="cuda")
        mask = torch.ones_like(given)
        with torch.inference_mode():
            found = self.model.generate(
                given, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False
            )
        return [int(each) for each in found[0, len(PROMPT) :]]


class Answers(BaseHTTPRequestHandler):
    """GET /N."""

    server: Server

    def do_GET(self) -> None:
        """By the name that http.server calls."""
        body = json.dumps(self.server.tokens(int(self.path.lstrip("/")))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until killed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--weights", default="", help="a file of safetensors")
    options.add_argument("--layers", type=int, default=32, help="32: 6.7e9 parameters, 12.6 GiB")
    given = options.parse_args()
    Server(given.port, given.layers, given.weights).serve_forever()


if __name__ == "__main__":
    main()
