"""The number of files, and of connections, that this process may open."""

import contextlib
import sys


def allow_open_files(number: int) -> int:
    """Allow `number` open files as far as the system does; returns how many are allowed."""
    try:
        import resource
    except ImportError:  # no such limits here
        return sys.maxsize
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != unlimited and soft < number:
        wanted = number if hard == unlimited else min(number, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit that it does not show
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return sys.maxsize if soft == unlimited else soft
