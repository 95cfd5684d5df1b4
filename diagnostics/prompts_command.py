"""`gated-attention prompts`: greedy answers of models, side by side."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

from .command import LoadOptions
from .comparisons import loaded_models, model_settings, prepare_folder, write_results
from .prompts import PROMPTS, Answer, answer_prompts, read_prompts
from .report import aligned, markdown_table, markdown_text


def run_prompts(
    models: list[str],
    load_options: LoadOptions,
    *,
    prompts: Path | None = None,
    max_new_tokens: int = 96,
    out: Path | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, list[Answer]]:
    """
    Greedy answers of models to the same prompts, side by side.

    Args:
        models: Folders or Hub ids; the others are compared with the first.
        load_options: How models are loaded.
        prompts (`Path`, *optional*): Text file with a prompt a line; default: twenty prompts of our own.
        max_new_tokens (`int`): Tokens of an answer at most.
        out (`Path`, *optional*): Folder for `prompts.json` and the page `prompts.md`, written after each model.
        echo: Where the report goes.

    Returns:
        The answers of each model, in the order of the prompts.

    Raises:
        [`InspectionError`]: a model or the prompts cannot be used.
    """
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    prepare_folder(out, plots=False)
    results, settings = {}, {}
    vocabulary = first = None
    for name, model, tokenizer in loaded_models(models, load_options):
        if vocabulary is None:
            vocabulary = tokenizer.get_vocab()
        comparable = first if tokenizer.get_vocab() == vocabulary else None
        results[name] = answer_prompts(
            model, tokenizer, asked, max_new_tokens=max_new_tokens, first=comparable, name=name
        )
        first = first or results[name]
        chat = tokenizer.chat_template is not None
        settings[name] = model_settings(model, chat_template=chat, max_new_tokens=max_new_tokens)
        del model
        found = {
            name: {"settings": settings[name], "answers": [answer.to_dict() for answer in answers]}
            for name, answers in results.items()
        }
        write_results(out, "prompts.json", found)
        if out is not None:
            (out / "prompts.md").write_text(prompts_page(results, settings), encoding="utf-8")
    lines = [_settings_line(name, settings[name], len(asked)) for name in results]
    echo("\n".join(lines) + "\n\n" + aligned(prompts_rows(results)))
    if out is not None:
        echo(f"\nprompts.json and prompts.md, with the answers side by side, are in {out}")
    return results


def prompts_rows(results: dict[str, list[Answer]]) -> list[list[str]]:
    """What the answers are like: a header and one row a figure, means over prompts."""
    first = next(iter(results.values()))
    rows = [
        ["", *results],
        ["tokens", *(f"{mean(len(a.token_ids) for a in answers):.1f}" for answers in results.values())],
        ["came to an end", *(f"{sum(a.ended for a in answers)} of {len(answers)}" for answers in results.values())],
        [
            "distinct pairs (distinct-2)",
            *(f"{mean(a.distinct_2 for a in answers):.3f}" for answers in results.values()),
        ],
        ["runs of four repeated", *(f"{mean(a.repetition for a in answers):.1%}" for answers in results.values())],
    ]
    if len(results) > 1:
        others = [None if answers is first else answers for answers in results.values()]
        rows.append(["repeated more than by the first", *(_repeated_more(first, answers) for answers in others)])
        compared = [answers if answers and answers[0].agreement is not None else None for answers in others]
        rows.append(
            [
                "tokens until the first difference",
                *(f"{mean(a.agreement for a in answers):.1f}" if answers else "-" for answers in compared),
            ]
        )
        rows.append(
            [
                "the same answer",
                *(f"{sum(a.same for a in answers)} of {len(answers)}" if answers else "-" for answers in compared),
            ]
        )
    return rows


def _repeated_more(first: list[Answer], answers: list[Answer] | None) -> str:
    """Mean difference over prompts, with its standard error: whether it is more than chance."""
    if answers is None:
        return "-"
    more = [a.repetition - b.repetition for a, b in zip(answers, first, strict=True)]
    error = f" ± {stdev(more) / len(more) ** 0.5:.1%}" if len(more) > 1 else ""
    return f"{mean(more):+.1%}{error}"


def prompts_page(results: dict[str, list[Answer]], settings: dict[str, dict]) -> str:
    """The answers side by side, in Markdown."""
    number = len(next(iter(results.values())))
    lines = ["# Answers side by side", "", *markdown_table(prompts_rows(results))]
    lines += ["", *(f"{_settings_line(name, settings[name], number)}.  " for name in results), ""]
    for place, answers in enumerate(zip(*results.values(), strict=True)):
        lines += [f"## {place + 1}. {markdown_text(answers[0].prompt)}", ""]
        notes = [
            f"{len(a.token_ids)} tokens{'' if a.ended else ', cut off'}, {a.repetition:.0%} repeated"
            + ("" if a.agreement is None else ", the same" if a.same else f", the same for {a.agreement}")
            for a in answers
        ]
        texts = [answer.text for answer in answers]
        lines += [*markdown_table([[*results], texts, [f"*{note}*" for note in notes]]), ""]
    return "\n".join(lines)


def _settings_line(name: str, settings: dict, prompts: int) -> str:
    manner = "as a chat" if settings["chat_template"] else "as plain text, since its tokenizer has no chat template"
    return (
        f"{name}: {prompts} prompts {manner}, greedy, at most {settings['max_new_tokens']} tokens; {settings['dtype']}"
    )
