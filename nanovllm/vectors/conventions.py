"""Conventions: how a model's vectors are made, from the files of sentence-transformers if any.

`modules.json` lists what follows the decoder: a pooling, a normalization, or for rerankers two
tokens that are compared. `config_sentence_transformers.json` has prompts by name. Modules that are
not built here are errors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.models.checkpoint import fields_of, ordinary_file
from nanovllm.models.index import is_inside
from nanovllm.utils.checks import check_bool, check_int, shorten
from nanovllm.vectors.pooling import Pooling

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
POOLING_OF: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
OLD_FLAGS = {  # names in older files, by the present name
    "cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens",
    "lasttoken": "pooling_mode_lasttoken", "max": "pooling_mode_max_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class Conventions:
    """What the files of a model say. Without files: the last token's state, normalized.

    `labels` are the tokens for a relevant and for an irrelevant document, in models that rank.
    `pools_prompt`: whether the tokens of a named prompt are pooled too.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    labels: tuple[int, int] | None = None

    def prefix(self, name: str | None) -> str:
        """The prompt `name`, or the default one; "" if there is none by default."""
        if name is None:
            name = self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise ValueError(f"prompt_name must be one of the model's ({known}), got {name!r}")
        prefix = self.prompts[name]
        if prefix and not self.pools_prompt and self.pooling != "last":
            raise ValueError(
                f"prompt_name={name!r}: the model pools without the prompt's tokens (include_prompt"
                " is false), which is not supported"
            )
        return prefix


def read_conventions(path: Path, hidden_size: int) -> Conventions:
    """Read the files in a model directory. What is not supported is a ValueError."""
    found: dict[str, Any] = {}
    if (path / MODULES).exists():
        found = {"normalize": False}
        for module in _modules(path / MODULES):
            found |= _module(path, module, hidden_size)
    if (path / PROMPTS).exists():
        with fields_of(path / PROMPTS) as raw:
            found |= _prompts(raw)
    return Conventions(**found)


def _modules(path: Path) -> list[Mapping[str, Any]]:
    """The modules of a list in a file."""
    try:
        modules = json.loads(ordinary_file(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    is_list = isinstance(modules, list)
    if not is_list or not all(isinstance(m, dict) and m.get("type") for m in modules):
        raise ValueError(f"{path} must be a list of modules, each with a type")
    return [{**module, "type": str(module["type"])} for module in modules]


def _module(path: Path, module: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """The conventions that a module sets."""
    kind = module["type"].rpartition(".")[2]
    if kind == "Transformer":
        return {}
    if kind == "Normalize":
        return {"normalize": True}
    if kind not in ("Pooling", "LogitScore"):
        raise ValueError(
            f"{path / MODULES}: module {module['type']} is not supported; supported are"
            " Transformer, Pooling, Normalize and LogitScore"
        )
    folder = module.get("path", "")
    if not isinstance(folder, str) or not is_inside(folder):
        raise ValueError(
            f"{path / MODULES}: path must be a folder of the model's directory, got"
            f" {shorten(folder)}"
        )
    with fields_of(path / folder / "config.json") as raw:
        return _pooling(raw, hidden_size) if kind == "Pooling" else _labels(raw)


def _pooling(raw: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if raw.get(name, hidden_size) != hidden_size:
            raise ValueError(f"{name} must be the model's hidden_size {hidden_size}")
    modes = raw.get("pooling_mode", [mode for mode, flag in OLD_FLAGS.items() if raw.get(flag)])
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in POOLING_OF:
        allowed = ", ".join(map(repr, POOLING_OF))
        raise ValueError(f"pooling_mode must be one of {allowed}, got {shorten(modes)}")
    pools_prompt = check_bool("include_prompt", raw.get("include_prompt", True))
    return {"pooling": POOLING_OF[modes[0]], "pools_prompt": pools_prompt}


def _labels(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw.get("false_token_id") is None:
        raise ValueError("false_token_id is null: a score of one token alone is not supported")
    names = ("true_token_id", "false_token_id")
    return {"labels": tuple(check_int(name, raw[name], 0) for name in names)}


def _prompts(raw: Mapping[str, Any]) -> dict[str, Any]:
    prompts = raw.get("prompts") or {}
    default = raw.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise ValueError(f"prompts must be texts by name, got {shorten(prompts)}")
    if default is not None and default not in prompts:
        raise ValueError(f"default_prompt_name must be one of prompts, got {shorten(default)}")
    return {"prompts": prompts, "default_prompt": default}
