"""Measure llama.cpp with one format of weights, in a process that `llama.py` starts.

    python benchmarks/llama_peer.py FORMAT FOLDER THREADS

It uses nothing else of this project, so that any Python that has `llama-cpp-python` and `gguf` can
run it. The files with random weights are kept in FOLDER; llama.cpp's own function quantizes them.
A line of stdin has the number of requests, the tokens to decode for each, or 0 for a prefill of
512, and a number that makes the prompts differ. The answer is a line with the tokens per second.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 28, 16, 8, 128
VOCAB, EPS, THETA, CONTEXT = 151_936, 1e-6, 1e6, 2048
PROMPT, PREFILL = 16, 512  # tokens before those that are decoded; of a prefill

Measure = Callable[[int, int, int], float]  # requests, tokens of each, index: tokens per second


def prompts(requests: int, size: int, index: int) -> list[list[int]]:
    """Token ids that no other round or request has, so that no prefix is cached."""
    first = 1 + 1000 * index
    return [[(first + 31 * i + 7 * j) % VOCAB for j in range(size)] for i in range(requests)]


def write_gguf(file: Path) -> None:
    """Write random bf16 weights. Peak memory: the file's 1.2 GB, and a matrix in float32."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            return
        numbers = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        upper = np.ascontiguousarray(numbers.view(np.uint16)[:, 1::2])
        writer.add_tensor(f"{name}.weight", upper.view(np.uint8),
                          raw_dtype=gguf.GGMLQuantizationType.BF16)  # fmt: skip

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    add("token_embd", VOCAB, HIDDEN)
    add("output_norm", HIDDEN)
    for block in (f"blk.{i}" for i in range(LAYERS)):
        for norm, size in (("attn", HIDDEN), ("ffn", HIDDEN), ("attn_q", HEAD_DIM),
                           ("attn_k", HEAD_DIM)):  # fmt: skip
            add(f"{block}.{norm}_norm", size)
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            add(f"{block}.attn_{name}", size, HIDDEN)
        add(f"{block}.attn_output", HIDDEN, queries)
        add(f"{block}.ffn_gate", FEED_FORWARD, HIDDEN)
        add(f"{block}.ffn_up", FEED_FORWARD, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_file(name: str, folder: Path, threads: int) -> Path:
    """The file of a format, which is written if there is none."""
    import llama_cpp as cpp

    file = folder / f"qwen3-0.6b-{name}.gguf"
    if file.exists():
        return file
    part = file.with_suffix(".part")
    if name == "BF16":
        write_gguf(part)
    else:
        source = gguf_file("BF16", folder, threads)
        params = cpp.llama_model_quantize_default_params()
        params.ftype = getattr(cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        params.nthread = threads
        if cpp.llama_model_quantize(bytes(source), bytes(part), params):
            sys.exit(f"llama.cpp cannot quantize to {name}")
    return part.replace(file)


def llama(name: str, folder: Path, threads: int) -> Measure:
    """llama.cpp with one of its formats, by its C functions, with its default options."""
    import llama_cpp as cpp

    quiet = cpp.llama_log_callback(lambda *_: None)
    cpp.llama_log_set(quiet, None)
    cpp.llama_backend_init()
    file = gguf_file(name, folder, threads)
    model = cpp.llama_model_load_from_file(bytes(file), cpp.llama_model_default_params())
    params = cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = 16 * PREFILL, 16
    params.n_threads = params.n_threads_batch = threads
    context = cpp.llama_init_from_model(model, params)
    if not context:
        sys.exit(f"llama.cpp cannot load {file}")
    batch = cpp.llama_batch_init(PREFILL, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows of token, position, sequence, and whether its logits are wanted."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if cpp.llama_decode(context, batch):
            sys.exit("llama_decode has failed")
        cpp.llama_synchronize(context)

    def measure(requests: int, tokens: int, index: int) -> float:
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        size = PROMPT if tokens else PREFILL
        of_all = list(enumerate(prompts(requests, size, index)))
        rows = [(token, j, i, j == size - 1) for i, prompt in of_all
                for j, token in enumerate(prompt)]  # fmt: skip
        start = time.perf_counter()
        decode(rows)
        if not tokens:
            return PREFILL / (time.perf_counter() - start)
        start = time.perf_counter()
        for step in range(tokens):
            decode([(prompt[step % size], size + step, i, True) for i, prompt in of_all])
        return requests * tokens / (time.perf_counter() - start)

    return measure


def serve(measure: Measure) -> None:
    """Measure what each line of stdin asks for. Other output of the process goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=stdout, flush=True)
    for line in sys.stdin:
        print(measure(*map(int, line.split())), file=stdout, flush=True)


if __name__ == "__main__":
    serve(llama(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
