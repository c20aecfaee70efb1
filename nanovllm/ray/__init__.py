"""A model on many machines and GPUs, through Ray.

data.py      Ray Data: batch jobs, `answer(dataset, model, replicas=8)`
serve.py     Ray Serve: an HTTP server, `serve.run(serving_app(model, num_replicas=8))`
placement.py the cores or GPUs of a replica

A replica is an engine with all its ranks, in a process that Ray starts. Engines know nothing of
Ray. Each name is imported when it is first used: Ray Data needs no web server, and Ray Serve no
Arrow.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from nanovllm.ray.data import ANSWER, EngineReplica, answer
    from nanovllm.ray.serve import ServerReplica, build, serving_app

__all__ = ["ANSWER", "EngineReplica", "ServerReplica", "answer", "build", "serving_app"]
_MODULES = {
    "ANSWER": "data",
    "EngineReplica": "data",
    "ServerReplica": "serve",
    "answer": "data",
    "build": "serve",
    "serving_app": "serve",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'nanovllm.ray' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"nanovllm.ray.{_MODULES[name]}"), name)
