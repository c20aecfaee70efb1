"""Try an installation: sums of the embedded model, and one request to its server.

`make lowest` runs it with the lowest version of PyTorch that pyproject.toml allows.
"""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL

OPTIONS = ("--device", "cpu", "--cpu-kvcache-gib", "0.05")
SERVE = [sys.executable, "-m", "nanovllm", "serve", str(EMBEDDED_MODEL), "--port", "0", *OPTIONS]
SECONDS = 60.0  # that an answer takes at most
SUMS = {"12+34=": "46", "250+250=": "500", "7+8=": "15"}


def try_sums(backend: str) -> None:
    """Sums by the kernels of a CPU, or by plain PyTorch."""
    options = dict(device="cpu", cpu_kvcache_gib=0.05, attention_backend=backend)
    with LLM(EMBEDDED_MODEL, **options) as llm:
        outputs = llm.generate(list(SUMS), SamplingParams(temperature=0), use_tqdm=False)
    found = [output.text for output in outputs]
    assert found == list(SUMS.values()), (backend, found)


def address_in(lines: Iterable[str]) -> str:
    """The server's address in its output; if it ends before, an error with the output."""
    read = []
    for line in lines:
        read.append(line)
        if (found := re.search(r" at (http\S+)", line)) is not None:
            return found[1]
    raise RuntimeError(f"the server has ended: {''.join(read)}")


def try_server() -> None:
    """A chat, over HTTP."""
    with subprocess.Popen(
        SERVE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as one:
        try:
            assert one.stdout is not None
            url = address_in(iter(one.stdout.readline, ""))
            body = {"messages": [{"role": "user", "content": "12+34="}], "temperature": 0}
            address = f"{url}/v1/chat/completions"
            with urllib.request.urlopen(address, json.dumps(body).encode(), SECONDS) as response:
                answer = json.load(response)
        finally:
            one.terminate()
            one.communicate()
    assert answer["choices"][0]["message"]["content"] == "46", answer


if __name__ == "__main__":
    for name in ("cpu", "torch"):
        try_sums(name)
    try_server()
    print(f"PyTorch {torch.__version__}: sums and a chat are right")
