"""What test_families.py must know of a family, and how a small model of it is written."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from conftest import SHAPE, byte_tokenizer


@dataclass(frozen=True)
class Sample:
    """A small model: its class in transformers, and the fields of its config besides `SHAPE`.

    None leaves out a field of `SHAPE`. `adjust` changes the random values of the model. Models that
    `refuses` the names of regimes are not run in them: a reason for each. Prompts are not `padded`
    if that changes what transformers computes. `adapters` names one of `adapted.ADAPTERS`.
    """

    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 1
    adjust: Callable[[Any], None] | None = None
    refuses: dict[str, str] = field(default_factory=dict)
    padded: bool = True
    adapters: str = "all"


@dataclass(frozen=True)
class Published:
    """The fields of a published config.json, and the number of parameters of its text model."""

    file: dict[str, Any]
    num_parameters: int


def config_class(architecture: str) -> Any:
    """transformers' config of the text model."""
    found = getattr(transformers, architecture).config_class
    text = found.sub_configs.get("text_config", found)
    return type(found().text_config) if text is transformers.AutoConfig else text


@torch.no_grad()
def write(path: Path, sample: Sample) -> Path:
    """Save a random model with its tokenizer, as transformers saves it."""
    torch.manual_seed(sample.seed)
    fields = {n: v for n, v in (SHAPE | sample.fields).items() if v is not None or n not in SHAPE}
    model_class = getattr(transformers, sample.architecture)
    model = model_class(model_class.config_class(**fields)).to(torch.float32)
    for name, param in model.named_parameters():
        if param.dim() > 1:  # larger than training would start with: peaked, varied outputs
            param.normal_(0.0, 0.15)
        elif name.endswith("bias"):
            param.normal_(0.0, 0.5)
        else:
            param.uniform_(0.5, 1.5)
    if sample.adjust is not None:
        sample.adjust(model)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
