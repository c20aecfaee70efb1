"""The number of files, and of connections, that this process may open."""

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
        soft = number if hard == unlimited else min(number, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return sys.maxsize if soft == unlimited else soft
