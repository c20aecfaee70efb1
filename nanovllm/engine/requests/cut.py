"""Parameters that depend on a prompt's length: which tokens are kept, how many must follow."""

from typing import NoReturn


def last_tokens(token_ids: list[int], kept: int, most: int, why: str) -> list[int]:
    """The last `kept` tokens, or with -1 the last `most`, which `why` explains."""
    if kept > most:
        raise ValueError(f"truncate_prompt_tokens must be at most {most} ({why}), got {kept}")
    return token_ids[-(most if kept == -1 else kept) :]


def refuse_min_tokens(min_tokens: int, max_model_len: int, num_prompt_tokens: int) -> NoReturn:
    """Raise the error for more `min_tokens` than there is room for."""
    raise ValueError(
        f"min_tokens must be at most {max_model_len - num_prompt_tokens}"
        f" (max_model_len={max_model_len} less {num_prompt_tokens} prompt tokens), got {min_tokens}"
    )
