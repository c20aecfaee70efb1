"""How long it takes to send a decode step to the other ranks.

    python benchmarks/channel.py [--ranks 2]

Sends decode steps of growing batches to processes that only read them. Reports two medians: the
time until `send` returns (`sent`), after which rank 0 computes, and the time until all other ranks
have decoded the step's arrays (`received`). Between steps the others wait for `--gap` milliseconds:
they poll first and then sleep.
"""

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import time

from nanovllm.engine.ranks.channel import Reader, Writer
from nanovllm.engine.ranks.codec import decode, encode
from nanovllm.engine.run.device_table import TableLayout
from nanovllm.engine.run.ledger import Ledger
from nanovllm.engine.run.step_inputs import step_inputs
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

CONTEXT, BLOCK_SIZE = 1024, 16
STAMP = struct.Struct("<q")


def read_forever(fd: int, bell: int, index: int, num_readers: int, answer: int) -> None:
    """Run as another rank, which answers each step with the time of its arrival."""
    reader = Reader(fd, bell, index, num_readers)
    while True:
        decode(reader.receive())
        os.write(answer, STAMP.pack(time.monotonic_ns()))


def start_reader(
    writer: Writer, index: int, num_readers: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start another rank; return its process and the pipe of its answers."""
    answers, answer = os.pipe()
    fds = (writer.fd, writer.bells[index][0], answer)
    numbers = [str(n) for n in (*fds[:2], index, num_readers, answer)]
    process = subprocess.Popen([sys.executable, __file__, "--read", *numbers], pass_fds=fds)
    os.close(answer)
    return process, answers


def time_steps(
    writer: Writer, answers: list[int], num_seqs: int, num_steps: int, gap_seconds: float
) -> dict[str, float]:
    """Send `num_steps` decode steps of `num_seqs` sequences; return medians in microseconds."""
    seqs = [Sequence([0] * CONTEXT, SamplingParams()) for _ in range(num_seqs)]
    ledger = Ledger(TableLayout(num_seqs, (CONTEXT + num_steps) // BLOCK_SIZE + 1, BLOCK_SIZE))
    sent, received = list[int](), list[int]()
    for step in range(num_steps):
        for seq in seqs:
            seq.num_cached_tokens = CONTEXT + step
            while len(seq.block_table) * BLOCK_SIZE <= seq.num_cached_tokens:
                seq.block_table.append(step)
        inputs = step_inputs(Batch(seqs, is_prefill=False), BLOCK_SIZE, ledger)
        time.sleep(gap_seconds)
        start = time.monotonic_ns()
        writer.send(encode(inputs))
        sent.append(time.monotonic_ns() - start)
        received.append(max(STAMP.unpack(os.read(fd, 8))[0] for fd in answers) - start)
    return {"sent": statistics.median(sent) / 1e3, "received": statistics.median(received) / 1e3}


def main() -> None:
    """Print a line for each batch size, and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="rank 0 and N - 1 others")
    parser.add_argument("--gap", type=float, default=0.5, metavar="MS", help="between steps")
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="for each batch size")
    parser.add_argument("--read", type=int, nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_forever(*args.read)
    num_readers = args.ranks - 1
    results = {}
    for num_seqs in (1, 64, 256):
        writer = Writer(num_readers, check=lambda: None)
        readers = [start_reader(writer, index, num_readers) for index in range(num_readers)]
        answers = [answer for _, answer in readers]
        results[num_seqs] = time_steps(writer, answers, num_seqs, args.steps, args.gap / 1e3)
        print(f"{num_seqs:4} sequences: sent in {results[num_seqs]['sent']:.0f} us,"
              f" received after {results[num_seqs]['received']:.0f} us")  # fmt: skip
        for process, _ in readers:
            process.kill()
            process.wait()
        writer.close()
    print(json.dumps({"ranks": args.ranks, "microseconds": results}))


if __name__ == "__main__":
    main()
