"""Which tokens of a prompt are kept."""


def last_tokens(token_ids: list[int], kept: int, most: int, why: str) -> list[int]:
    """The last `kept` tokens, or with -1 the last `most`, which `why` explains."""
    if kept > most:
        raise ValueError(f"truncate_prompt_tokens must be at most {most} ({why}), got {kept}")
    return token_ids[-(most if kept == -1 else kept) :]
