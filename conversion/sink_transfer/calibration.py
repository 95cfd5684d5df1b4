"""The tokens that a sink transfer is calibrated on, and those that it is judged by."""

from dataclasses import dataclass

import torch

from ..errors import ConversionError


# Share of the calibration windows that nothing is fitted to: they choose between fits and predict the result.
HELD_OUT_SHARE = 1 / 8


@dataclass(frozen=True)
class Calibration:
    """
    Windows of text.

    Attributes:
        input_ids: `(windows, length)`. Some begin with BOS and some within the text, if the tokenizer has a BOS token.
        held_out: How many of them, at the end, are not fitted to.
        bos: Which windows begin with BOS, `(windows,)`.
        test: `(windows, length)`: windows from the end of the text, which take no part in the calibration; all begin as the
            tokenizer begins a text.
    """

    input_ids: torch.Tensor
    held_out: int
    bos: torch.Tensor
    test: torch.Tensor

    @property
    def fitted(self) -> int:
        return len(self.input_ids) - self.held_out

    @property
    def held_out_ids(self) -> torch.Tensor:
        return self.input_ids[self.fitted :]


def windows_before_test(tokens: int, length: int, test_tokens: int) -> int:
    """How many windows of `length` a text of so many tokens has before those of its end that are for the test."""
    return tokens // length - test_tokens // length


def calibration_windows(
    tokenizer,
    text: str,
    tokens: int = 32768,
    length: int = 512,
    test_tokens: int = 0,
    bos_share: float = 0.75,
    seed: int = 0,
) -> Calibration:
    """
    Cut a text into windows for calibration and, from its end, windows for a test.

    Args:
        tokenizer: The model's tokenizer.
        text (`str`): Text of the kind that the model is for.
        tokens, test_tokens (`int`): Tokens in each part, rounded down to whole windows.
        length (`int`): Tokens in a window, BOS included.
        bos_share (`float`): Share of the calibration windows that begin with BOS, if the tokenizer has one: a model also
            meets texts that begin with another token, and the first token becomes the sink whatever it is.
        seed (`int`): Decides which windows of a long text are taken, and their order.

    Raises:
        [`ConversionError`]: the text is too short.
    """
    if length < 16:
        raise ConversionError(f"`length` must be at least 16, got {length}")
    count = tokens // length
    if count < 8:
        raise ConversionError(f"`tokens` must hold at least 8 windows of `length` {length}, got {tokens}")
    if not 0 <= bos_share <= 1:
        raise ConversionError(f"`bos_share` must lie between 0 and 1, got {bos_share}")
    # Pages of text are no sentence to warn about: they are cut into windows here.
    token_ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    available = windows_before_test(len(token_ids), length, test_tokens)
    if available < count:
        for_test = test_tokens // length * length
        wanted = f"{count * length:,} tokens to calibrate" + (f" and {for_test:,} to test" if for_test else "")
        raise ConversionError(
            f"the calibration text has {len(token_ids):,} tokens, {wanted} are asked for; give a longer text, or fewer "
            f"tokens (--tokens, --test-tokens)"
        )
    windows = token_ids[: len(token_ids) // length * length].unflatten(0, (-1, length))
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(available, generator=generator)[:count]
    calibration, test = windows[chosen].clone(), windows[available:].clone()

    bos = torch.zeros(count, dtype=torch.bool)
    if tokenizer.bos_token_id is not None:
        bos = torch.rand(count, generator=generator) < bos_share
        calibration[bos] = _with_first(calibration[bos], tokenizer.bos_token_id)
        test = _with_first(test, tokenizer.bos_token_id)
    return Calibration(calibration, max(2, round(count * HELD_OUT_SHARE)), bos, test)


def _with_first(windows: torch.Tensor, token_id: int) -> torch.Tensor:
    """The windows with another token in front, and without their last one."""
    return torch.cat([torch.full_like(windows[:, :1], token_id), windows[:, :-1]], dim=1)
