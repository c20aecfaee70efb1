"""How workers of pytest-xdist share the tests: each file, or each family of models, is for one.

So what the tests of a file make for all of them is made once in a run. The costliest files come
first, by the recording of `costs`, so that all workers end at about the same time.
"""

import math
from typing import Any

import costs
import pytest

FAMILIES = "tests/test_families.py"
RAY = "Ray's cluster"  # which these files share
COMMON = {"tests/test_ray.py": RAY, "tests/test_ray_serve.py": RAY}


def unit_of(nodeid: str) -> str:
    """The name of the tests that one worker runs together with this one."""
    file, _, test = nodeid.partition("::")
    if file == FAMILIES:  # whose tests share the models of a family
        return "family " + test.partition("[")[2].partition("-")[0].removesuffix("]")
    return COMMON.get(file, file)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def sort(items: list[pytest.Item], recorded: dict[str, float]) -> None:
    """Sort by the recorded costs of files; files that have none come first if a test is slow."""
    slow = {file_of(item.nodeid) for item in items if "slow" in item.keywords}
    unknown = dict.fromkeys(slow, math.inf)
    known = unknown | recorded
    items.sort(key=lambda item: -known.get(file_of(item.nodeid), 0.0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # in a worker
        sort(items, costs.recorded())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # by the number of tests
    return Scheduling(config, log)
