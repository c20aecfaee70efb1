"""The errors for prompts of a length that the model does not take. Imported for such a prompt."""


class PromptTooLongError(ValueError):
    """The model takes no prompt of this length, or not with the tokens that must follow it."""


def refuse_length(number: int, most: int, why: str, min_tokens: int, max_model_len: int) -> None:
    """Raise for a prompt with this number of tokens, which is not one of 1 to `most`.

    Or which leaves no room for `min_tokens`.
    """
    if not 1 <= number <= most:
        kind = PromptTooLongError if number else ValueError
        raise kind(f"prompt must have 1 to {most} tokens ({why}), got {number}")
    raise PromptTooLongError(
        f"min_tokens must be at most {max_model_len - number} (max_model_len={max_model_len} less"
        f" {number} prompt tokens), got {min_tokens}"
    )
