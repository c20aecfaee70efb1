"""Time one engine on one workload, in a process that `bench.py --peers` starts for each engine.

    python benchmarks/peer.py JOB.json

It loads the job's engine, warms it up with one request, times the whole workload once and prints
one JSON object. It uses only the public interfaces of engines and nothing else of this project, so
that any Python that has the engine can run it. Stdout is for that object: output of the engine and
its processes goes to stderr.

A job has `engine`, `module` (the package's name), `model` (a directory), `device` ("cpu" or
"cuda"), `dtype`, `temperature`, `prompts` (lists of token ids), `output_lens` (tokens to generate
for each, past any end-of-text), `warmup` (a prompt), and `options` (keywords for the engine).
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARMUP_TOKENS = 16

Job = dict[str, Any]
Generate = Callable[[list[list[int]], list[int]], list[int]]  # returns the number of tokens of each


def params_of(sampling_params: Any, job: Job, output_lens: list[int]) -> list[Any]:
    """Sampling parameters for each request, which generates its full length."""
    return [
        sampling_params(temperature=job["temperature"], ignore_eos=True, max_tokens=n)
        for n in output_lens
    ]


def nanovllm(job: Job) -> Generate:
    """Run this project's engine."""
    from nanovllm import LLM, SamplingParams

    llm = LLM(job["model"], **job["options"])

    def generate(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        params = params_of(SamplingParams, job, output_lens)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]

    return generate


def nano_vllm(job: Job) -> Generate:
    """Run nano-vllm, which has nanovllm's interface, but no options for device and type."""
    if job["device"] != "cuda":
        sys.exit(f"nano-vllm needs CUDA and flash-attn, and the device is {job['device']}")
    config = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
    dtype = config.get("torch_dtype") or config.get("dtype")
    if dtype != job["dtype"]:
        sys.exit(f"nano-vllm runs in the model's own type, {dtype}, not in {job['dtype']}")
    return nanovllm(job)


def vllm(job: Job) -> Generate:
    """Run vLLM, on the device that it was built for."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB, as nanovllm
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    if current_platform.device_type != job["device"]:
        sys.exit(f"this vLLM is for {current_platform.device_type}, not for {job['device']}")
    llm = LLM(job["model"], dtype=job["dtype"], **job["options"])

    def generate(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        params = params_of(SamplingParams, job, output_lens)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


def transformers(job: Job) -> Generate:
    """Run `generate` on one padded batch, until its longest output is done.

    Tokens of other rows beyond their lengths are not counted as output.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    if job["options"].get("tensor_parallel_size", 1) > 1:
        sys.exit("transformers is run on one device, not on several ranks")
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], torch_dtype=getattr(torch, job["dtype"])
    )
    model = model.to(job["device"]).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output_lens: list[int]) -> list[int]:
        width, longest = max(map(len, prompts)), max(output_lens)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        # Replaces the model's own: other engines do not apply its filters and stop tokens.
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=job["temperature"], top_k=0, top_p=1.0,
            max_new_tokens=longest, pad_token_id=0,
        )  # fmt: skip
        outputs = model.generate(ids.to(job["device"]), attention_mask=mask.to(job["device"]))
        new = outputs[:, width:].tolist()
        return [len(row[:n]) for row, n in zip(new, output_lens, strict=True)]

    return generate


ENGINES: dict[str, Callable[[Job], Generate]] = {
    "nanovllm": nanovllm,
    "nano-vllm": nano_vllm,
    "vllm": vllm,
    "transformers": transformers,
}


def version(module: str) -> str:
    """The package's version, from its module or its installation."""
    from importlib import metadata

    own = getattr(importlib.import_module(module), "__version__", None)
    try:
        return str(own or metadata.version(module))
    except metadata.PackageNotFoundError:
        return "unknown"


def run(job: Job) -> dict[str, Any]:
    """Time the workload."""
    start = time.perf_counter()
    generate = ENGINES[job["engine"]](job)
    generate([job["warmup"]], [WARMUP_TOKENS])
    ready = time.perf_counter()
    lengths = generate(job["prompts"], job["output_lens"])
    seconds = time.perf_counter() - ready
    if lengths != job["output_lens"]:
        sys.exit(f"{job['engine']} generated {sum(lengths)} tokens, not {sum(job['output_lens'])}")
    return {
        "seconds": seconds,
        "setup_seconds": ready - start,
        "version": version(job["module"]),
        "torch": version("torch"),
        "file": sys.modules[job["module"]].__file__,
    }


def main() -> None:
    """Run the job of the command line.

    Stdout is kept for the result. This folder is removed from the import path, as other packages
    have modules of the same names.
    """
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job: Job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    here = Path(__file__).parent
    sys.path = [path for path in sys.path if Path(path) != here]
    print(json.dumps(run(job)), file=stdout, flush=True)


if __name__ == "__main__":
    main()
