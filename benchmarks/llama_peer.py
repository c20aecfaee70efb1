"""Measure llama.cpp with one file, in a process that `llama.py` starts.

    python benchmarks/llama_peer.py FILE FOLDER THREADS REQUESTS LENGTH

FILE is the path of a GGUF file, or SHAPE:FORMAT for one with random weights, which is kept in
FOLDER. llama.cpp has room for REQUESTS sequences of LENGTH tokens. Besides `llama_files.py` it uses
nothing of this project, so that any Python that has `llama-cpp-python` and `gguf` can run it. A
line of stdin has the number of requests, the tokens of each prompt, those to decode for each, or 0
for the prompts alone, and a number that makes the prompts differ. The answer is a line with the
tokens per second.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_files import gguf_file

__all__ = ["Measure", "clock", "prompts", "serve"]
VOCAB = 49_152  # of the file with the fewest tokens
BATCH = 512  # tokens that llama.cpp takes at a time

# Requests, tokens of a prompt, tokens that are decoded, index: tokens per second.
Measure = Callable[[int, int, int, int], float]

KEPT: list[Any] = []  # functions that llama.cpp may call until the process ends


def clock(threads: int) -> float:
    """Seconds: of the processor with one thread, which other processes hardly change."""
    return time.process_time() if threads == 1 else time.perf_counter()


def prompts(requests: int, size: int, index: int) -> list[list[int]]:
    """Token ids that no other round or request has, so that no prefix is cached."""
    first = 1 + 1000 * index
    return [[(first + 31 * i + 7 * j) % VOCAB for j in range(size)] for i in range(requests)]


def llama(name: str, folder: Path, threads: int, requests: int, length: int) -> Measure:
    """llama.cpp with a file, by its C functions, with its default options."""
    import llama_cpp as cpp

    KEPT.append(cpp.llama_log_callback(lambda *_: None))
    cpp.llama_log_set(KEPT[-1], None)
    cpp.llama_backend_init()
    file = gguf_file(name, folder, threads)
    model = cpp.llama_model_load_from_file(bytes(file), cpp.llama_model_default_params())
    params = cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = requests * length, requests
    params.n_threads = params.n_threads_batch = threads
    context = cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit(f"llama.cpp cannot load {file}")
    batch = cpp.llama_batch_init(BATCH, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows of token, position, sequence, and whether its logits are wanted."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if cpp.llama_decode(context, batch):
            sys.exit("llama_decode has failed")
        cpp.llama_synchronize(context)

    def measure(requests: int, size: int, tokens: int, index: int) -> float:
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        of_all = list(enumerate(prompts(requests, size, index)))
        rows = [(token, j, i, j == size - 1) for i, prompt in of_all
                for j, token in enumerate(prompt)]  # fmt: skip
        start = clock(threads)
        for first in range(0, len(rows), BATCH):
            decode(rows[first : first + BATCH])
        if not tokens:
            return len(rows) / (clock(threads) - start)
        start = clock(threads)
        for step in range(tokens):
            decode([(prompt[step % size], size + step, i, True) for i, prompt in of_all])
        return requests * tokens / (clock(threads) - start)

    return measure


def serve(measure: Measure) -> None:
    """Measure what each line of stdin asks for. Other output of the process goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=stdout, flush=True)
    for line in sys.stdin:
        print(measure(*map(int, line.split())), file=stdout, flush=True)


if __name__ == "__main__":
    serve(llama(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])))
