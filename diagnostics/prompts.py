"""
Does a model still answer as another does? Greedy answers to short prompts side by side, with what tells a broken one: length,
repetition, and how far it agrees with the first model's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig

from .capture import decoder_layers, evaluating
from .errors import InspectionError


PROMPTS = (
    "What is the capital of Australia?",
    "Explain in two sentences why the sky is blue.",
    "Give me three ideas for a quick vegetarian dinner.",
    "Write a short poem about a lighthouse in winter.",
    "How many legs do four spiders have together? Show your steps.",
    "Translate into French: Where is the train station?",
    "What is the difference between a list and a tuple in Python?",
    "Write a Python function that tells whether a word is a palindrome.",
    "Summarise in one sentence: The meeting was moved from Monday to Thursday because two people were ill.",
    "Name five animals that live in the sea.",
    "My neighbour plays loud music at night. Write a polite note to ask for quiet.",
    "What should I pack for a weekend of hiking in the rain?",
    "Correct the grammar: She don't likes to eats apples.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron, and why?",
    "Invent a name for a bakery run by a cat, and a slogan for it.",
    "List the months of the year that have 30 days.",
    "How does a bicycle stay upright while it is moving?",
    "Turn this into a question: The library opens at nine.",
    "Tell me a story of four sentences about a lost key.",
    "What is a good way to learn the names of new colleagues?",
)

# A token counts as repeated if it ends a run of so many that has been there before.
_RUN = 4


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        prompt, text: What was asked, and what was answered, without special tokens.
        token_ids: The answer's tokens; the one that ends it is left out.
        ended: Whether the model came to an end by itself.
        distinct_2: Share of the answer's pairs of neighbouring tokens that are different ones (distinct-2, arXiv 1510.03055).
        repetition: Share of the answer's runs of four tokens that have been there before.
        agreement: Tokens until the first difference from the first model's answer, or None where there is nothing to
            compare with: it is the first, or tokens mean something else.
        same: Whether it is the first model's answer, token for token; None as for `agreement`.
    """

    prompt: str
    text: str
    token_ids: list[int]
    ended: bool
    distinct_2: float
    repetition: float
    agreement: int | None = None
    same: bool | None = None

    def to_dict(self) -> dict:
        return asdict(self)


def read_prompts(path: Path) -> tuple[str, ...]:
    """
    Prompts of a UTF-8 file, one a line.

    Raises:
        [`InspectionError`]: there is no such file, it is not text, or it has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InspectionError(f"the prompts {path} cannot be read as UTF-8: {error}") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise InspectionError(f"the file {path} holds no prompt; write one a line")
    return prompts


@torch.no_grad()
def answer_prompts(
    model: nn.Module,
    tokenizer,
    prompts: Sequence[str] = PROMPTS,
    *,
    max_new_tokens: int = 96,
    first: Sequence[Answer] | None = None,
    name: str | None = None,
) -> list[Answer]:
    """
    Answer prompts greedily, as a chat where the tokenizer has a chat template, else by going on from the prompt.

    Args:
        model: A causal language model of transformers that can generate. No penalty or sampling of its generation config is
            used.
        tokenizer: The model's tokenizer.
        prompts: What to ask; each stands alone.
        max_new_tokens (`int`): Tokens of an answer at most.
        first (*optional*): The answers of a model with the same tokens, to compare with.
        name (*optional*): Said beside the progress bar.

    Raises:
        [`InspectionError`]: the model cannot generate, or `max_new_tokens` is less than 1.
    """
    if not getattr(model, "can_generate", lambda: False)():
        raise InspectionError(f"{type(model).__name__} cannot generate; give a causal language model of transformers")
    if max_new_tokens < 1:
        raise InspectionError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}")
    decoder_layers(model)  # refuses what is no decoder
    ends = end_tokens(model, tokenizer)
    answers = []
    with evaluating(model), _greedy(model, ends, max_new_tokens):
        for place, prompt in enumerate(
            tqdm(prompts, desc=f"Asking {name or type(model).__name__}", unit="prompt", disable=None)
        ):
            input_ids = prompt_ids(tokenizer, prompt).to(model.device)
            output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids))
            token_ids = output[0, input_ids.shape[1] :].tolist()
            answers.append(_answer(prompt, token_ids, ends, tokenizer, first[place] if first else None))
    return answers


def prompt_ids(tokenizer, prompt: str) -> torch.Tensor:
    """Token ids `(1, length)` of a prompt: as a user's turn where the tokenizer has a chat template, else as it stands."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")[
        "input_ids"
    ]


def end_tokens(model: nn.Module, tokenizer) -> list[int]:
    """Ids of the tokens that end an answer, in the order of generation config and tokenizer."""
    ids = model.generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return list(dict.fromkeys([*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]))


@contextmanager
def _greedy(model: nn.Module, ends: list[int], max_new_tokens: int) -> Iterator[None]:
    """Plain greedy decoding within the block: `generate` would fill in penalties that the model's own config has."""
    before = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else None,
    )
    try:
        yield
    finally:
        model.generation_config = before


def _answer(prompt: str, token_ids: list[int], ends: list[int], tokenizer, first: Answer | None) -> Answer:
    ended = bool(token_ids) and token_ids[-1] in ends
    token_ids = token_ids[:-1] if ended else token_ids
    return Answer(
        prompt=prompt,
        text=tokenizer.decode(token_ids, skip_special_tokens=True).strip(),
        token_ids=token_ids,
        ended=ended,
        distinct_2=distinct_share(token_ids, 2),
        repetition=1 - distinct_share(token_ids, _RUN),
        agreement=None if first is None else agreement(first.token_ids, token_ids),
        same=None if first is None else (first.token_ids, first.ended) == (token_ids, ended),
    )


def distinct_share(token_ids: Sequence[int], length: int) -> float:
    """Share of the runs of `length` tokens that are different ones; 1 where there is no run."""
    runs = [tuple(token_ids[start : start + length]) for start in range(len(token_ids) - length + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def agreement(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens until the first difference."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
