"""How threads of nanovllm's own processes share Python's lock, and the memory that they leave.

A caller's process is its own: nothing here is for that one.
"""

import sys
import threading
import time

from nanovllm.utils.resources import trim_heap

TURN_SECONDS = 0.0005  # a tenth of Python's own
TRIM_SECONDS = 10.0


def serve_many_threads() -> None:
    """Let threads wait less for each other, and return memory to the system that they have freed.

    A thread that computes in Python gives the lock to others only after its turn, and a step's
    thread asks for the lock again after each kernel: with Python's own turns of 5 ms, a thread that
    parses a large body would delay the step of a small model by half a second.
    """
    sys.setswitchinterval(TURN_SECONDS)
    threading.Thread(target=_trim, daemon=True, name="trim").start()


def _trim() -> None:
    """Trim the heap as long as the process lives, if it has worked since the last time."""
    last = time.process_time()
    while True:
        time.sleep(TRIM_SECONDS)
        now = time.process_time()
        if now - last > TRIM_SECONDS / 10:
            trim_heap()
        last = now
