"""The `gated-attention` command. Heavy imports stay inside the commands, so that `--help` answers at once."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from ._version import __version__
from .hub.command import push


app = typer.Typer(
    name="gated-attention",
    help="Gated attention for Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"gated-attention {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# Options that several commands share.
_Models = Annotated[
    list[str], typer.Argument(help="Folders or Hub ids, shown side by side; or demo-model, the demo's SmolLM2-135M.")
]
_Text = Annotated[Path | None, typer.Option(help="Text file; default: Python's own help pages.")]
_Dataset = Annotated[str | None, typer.Option(help="Data set: Hub id, or a folder of text, JSON Lines or parquet.")]
_Split = Annotated[str, typer.Option(help="Split of the data set.")]
_Column = Annotated[str, typer.Option(help="Column of the data set that holds text.")]
_Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="Begin with BOS; default: as the tokenizer does.")]
_KeepMassive = Annotated[bool, typer.Option("--keep-massive", help="Leave massive activations as large as they are.")]
_Dtype = Annotated[str, typer.Option(help="float32, bfloat16, ..., or auto: that of the checkpoint.")]
_Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda if there is one.")]
_TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run a model's own code.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a model folder at TARGET, as a whole.")]
_Granularity = Annotated[
    Literal["headwise", "elementwise"], typer.Option(help="One gate a head, or one a channel of a head.")
]
_TestTexts = Annotated[
    list[Path] | None, typer.Option(help="Text file of another kind to show the result on; may be repeated.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
_LayerByLayer = Annotated[
    bool | None,
    typer.Option(
        "--layer-by-layer/--whole",
        help="Compare with one layer of each model in memory, or with whole models; default: by the memory that is free.",
    ),
]

_VerifyStock = Annotated[
    Literal["none", "headers", "logits"],
    typer.Option(help="Check nothing; or names, shapes and formats; or also run both models."),
]


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(help="Folder of the checkpoint, never written to; or a Hub id, org/name or org/name@revision."),
    ],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    granularity: Annotated[
        Literal["headwise", "elementwise"] | None,
        typer.Option(
            help="One gate a head, or one a channel of a head.  [default: headwise, or those that the source has]"
        ),
    ] = None,
    gate_bias: Annotated[bool, typer.Option("--gate-bias", help="Give the gates a bias, zero at first.")] = False,
    init: Annotated[
        Literal["identity", "normal", "open", "zeros"],
        typer.Option(help="How gates begin; with identity the function is the source's, with the others it is not."),
    ] = "identity",
    init_std: Annotated[float, typer.Option(help="Standard deviation of the weights, with --init normal.")] = 0.02,
    init_bias: Annotated[float, typer.Option(help="The bias, with --init open.")] = 4.0,
    seed: Annotated[int, typer.Option(help="For the weights, with --init normal.")] = 0,
    link: Annotated[
        Literal["auto", "copy", "reflink", "hard"],
        typer.Option(
            help="Copy the source's shards; reflink (share blocks) or hard-link them, which takes no space and no time; or reflink "
            "if possible, else copy."
        ),
    ] = "auto",
    verify: Annotated[
        Literal["none", "headers", "logits"],
        typer.Option(help="Check nothing; or names, shapes and formats; or run both models and compare them too."),
    ] = "logits",
    layer_by_layer: _LayerByLayer = None,
    overwrite: _Overwrite = False,
    dry_run: _DryRun = False,
) -> None:
    """Add gates to a trained checkpoint without changing what it computes, or read one that has gates in another layout."""
    from .conversion import ConversionError, ConversionOptions, convert_checkpoint, plan_conversion
    from .conversion.sources import find_source_for

    try:
        options = ConversionOptions(
            granularity=granularity,
            gate_bias=gate_bias,
            init=init,
            init_std=init_std,
            init_bias=init_bias,
            seed=seed,
            link=link,
            verify=verify,
            layer_by_layer=layer_by_layer,
            overwrite=overwrite,
        )
        if dry_run:
            folder = find_source_for(source, target, overwrite).folder
            typer.echo(plan_conversion(folder, target, options).describe())
            return
        result = convert_checkpoint(source, target, options)
    except (ConversionError, OSError) as error:
        _fail(error)
    except KeyboardInterrupt:
        typer.echo(
            f"gated-attention: interrupted; {target} was not made. The same command begins again, or goes on", err=True
        )
        raise typer.Exit(code=130) from None
    typer.echo(result.plan.describe())
    if result.reused:
        typer.echo(f"reused   {', '.join(result.reused)}, which an earlier run had finished")
    steps = ", ".join(f"{step} {seconds:.2f} s" for step, seconds in result.seconds.items())
    typer.echo(f"done     {result.checked} ({steps})")


@app.command()
def verify(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of what was converted.")],
    target: Annotated[Path, typer.Argument(help="Folder of the result, as it was converted.")],
    level: Annotated[
        Literal["headers", "logits"],
        typer.Option(help="Config, names, shapes, formats, hashes and numbers; or also run both models and compare."),
    ] = "logits",
    layer_by_layer: _LayerByLayer = None,
) -> None:
    """Check a conversion again, by its certificate and against its source: every number, and what both compute."""
    from .conversion import ConversionError, verify_conversion

    try:
        verification = verify_conversion(source, target, level, layer_by_layer)
    except (ConversionError, OSError) as error:
        _fail(error)
    for check in verification.checks:
        typer.echo(check)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="Folder of the gated model, never written to.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    to: Annotated[
        Literal["qwen3_5", "qwen3_next", "lfm3"],
        typer.Option(help="Qwen's have elementwise gates, LFM3 headwise ones; all have QK-norm."),
    ],
    widen_gates: Annotated[
        bool,
        typer.Option("--widen-gates", help="Repeat headwise gates for each channel: the same function, elementwise."),
    ] = False,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Largest relative error of the logits in the format that is saved.  [default: 1e-5 in float32; in 16 bits twice the "
            "error that the model itself has there, beside its logits in float32]"
        ),
    ] = None,
    verify: _VerifyStock = "logits",
    layer_by_layer: _LayerByLayer = None,
    overwrite: _Overwrite = False,
    dry_run: _DryRun = False,
) -> None:
    """Write a gated model as a stock architecture of transformers, which runs without custom code."""
    from .conversion import ConversionError, export_checkpoint
    from .conversion.stock import plan_export

    try:
        if dry_run:
            typer.echo(plan_export(source, target, to, widen_gates, overwrite).describe())
            return
        result = export_checkpoint(
            source,
            target,
            to,
            widen_gates=widen_gates,
            max_error=max_error,
            verify=verify,
            layer_by_layer=layer_by_layer,
            overwrite=overwrite,
        )
    except (ConversionError, OSError) as error:
        _fail(error)
    _say_stock(result)


@app.command()
def strip(
    source: Annotated[Path, typer.Argument(help="Folder of the gated model, never written to.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    link: Annotated[
        Literal["auto", "copy", "reflink", "hard"],
        typer.Option(help="How files get there of which no tensor changes; as for convert."),
    ] = "auto",
    verify: _VerifyStock = "logits",
    layer_by_layer: _LayerByLayer = None,
    overwrite: _Overwrite = False,
    dry_run: _DryRun = False,
) -> None:
    """Give back the model without its gates, while they are the identity: the stock checkpoint that it was."""
    from .conversion import ConversionError, strip_checkpoint
    from .conversion.stock import plan_strip

    try:
        if dry_run:
            typer.echo(plan_strip(source, target, link, overwrite).describe())
            return
        result = strip_checkpoint(
            source, target, link=link, verify=verify, layer_by_layer=layer_by_layer, overwrite=overwrite
        )
    except (ConversionError, OSError) as error:
        _fail(error)
    _say_stock(result)


def _say_stock(result) -> None:
    typer.echo(result.plan.describe())
    typer.echo(result.describe())
    typer.echo(f"done     {', '.join(f'{step} {seconds:.2f} s' for step, seconds in result.seconds.items())}")


@app.command()
def families() -> None:
    """List the model families that can be converted, what happens to their tensors, and what is exact."""
    from .conversion.families import families_table

    typer.echo(families_table())


@app.command()
def transfer(
    source: Annotated[str, typer.Argument(help="Folder of the checkpoint, never written to; or demo-model.")],
    target: Annotated[Path | None, typer.Argument(help="Folder to make; not looked at with --report-only.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Text file of the kind the model is for; default: Python's own help pages.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 32768,
    length: Annotated[int, typer.Option(help="Tokens in a window: about as long as the texts to come.")] = 512,
    granularity: _Granularity = "headwise",
    bos_share: Annotated[
        float, typer.Option(help="Share of windows that begin with BOS; the others begin within the text.")
    ] = 0.75,
    attention_weight: Annotated[
        float, typer.Option(help="Cost of attention left on sinks. More: less sink, more error.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="For the choice of windows.")] = 0,
    keep_massive: _KeepMassive = False,
    test: _TestTexts = None,
    test_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens to show the result on: the end of the calibration text, and each --test. Loads whole models; 0: none."
        ),
    ] = 8192,
    dtype: _Dtype = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...: where layers run.")] = "cpu",
    on_disk: Annotated[
        bool, typer.Option("--on-disk", help="Keep the tokens' hidden states in temporary files.")
    ] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="Predict the result and write nothing.")] = False,
    overwrite: _Overwrite = False,
    out: Annotated[Path | None, typer.Option(help="Folder for figures, inspections and the report.")] = None,
) -> None:
    """Add gates that do the work of the attention sink, fitted on a text; or predict how well that would go."""
    from .conversion import ConversionError
    from .conversion.sink_transfer import TransferOptions
    from .conversion.sink_transfer.command import ShowOptions, run_transfer
    from .diagnostics import InspectionError

    try:
        options = TransferOptions(
            granularity=granularity,
            tokens=tokens,
            length=length,
            test_tokens=test_tokens,
            bos_share=bos_share,
            attention_weight=attention_weight,
            seed=seed,
            keep_massive=keep_massive,
            on_disk=on_disk,
            device=device,
            overwrite=overwrite,
        )
        run_transfer(
            Path(_with_demo_model([source])[0]),
            target,
            calibration,
            options,
            ShowOptions(tuple(test or ()), dtype, out),
            report_only=report_only,
            echo=typer.echo,
        )
    except (ConversionError, InspectionError, OSError) as error:
        _fail(error)


@app.command()
def heal(
    source: Annotated[str, typer.Argument(help="Folder of the checkpoint, never written to; or demo-model.")],
    target: Annotated[Path, typer.Argument(help="Folder to make.")],
    text: Annotated[
        Path | None, typer.Option(help="Text file of the kind the model is for; default: Python's own help pages.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to learn the source's predictions on.")] = 81920,
    length: Annotated[int, typer.Option(help="Tokens in a row of those.")] = 512,
    batch: Annotated[int, typer.Option(help="Rows in a step.")] = 2,
    learning_rate: Annotated[
        float, typer.Option(help="Of attention's weights; gates and biases: ten times this.")
    ] = 2e-4,
    sink_share: Annotated[float, typer.Option(help="Cost of attention on the first token.")] = 1.0,
    activations: Annotated[float, typer.Option(help="Cost of activations above 300, by their logarithm.")] = 0.03,
    copy_share: Annotated[
        float, typer.Option(help="Share of rows with random tokens that are repeated, to keep copying.")
    ] = 0.2,
    sampled_share: Annotated[
        float, typer.Option(help="Share of rows that the source writes by itself, of all kinds that it knows.")
    ] = 0.3,
    chat_share: Annotated[
        float, typer.Option(help="Share of those that are chats, if the tokenizer has a chat template.")
    ] = 0.5,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16: faster on GPUs, and on CPUs with AMX.")
    ] = False,
    smoothing: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="How strongly outliers go from inputs into weights at the end, which helps eight bits and changes nothing else. 0: not at all.",
        ),
    ] = 0.7,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to calibrate the transfer on.")] = 32768,
    calibration_length: Annotated[int, typer.Option(help="Tokens in a window of those, and of the tests.")] = 512,
    granularity: _Granularity = "headwise",
    seed: Annotated[int, typer.Option(help="For the choice of windows and rows.")] = 0,
    keep_massive: _KeepMassive = False,
    test: _TestTexts = None,
    test_tokens: Annotated[
        int, typer.Option(help="Tokens to test on: the end of the text, which takes no part, and each --test.")
    ] = 8192,
    dtype: _Dtype = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...: where models run.")] = "cpu",
    overwrite: _Overwrite = False,
) -> None:
    """Transfer sinks to gates, then let the result learn its source's predictions, and test source, transfer and result."""
    from .conversion import ConversionError
    from .conversion.sink_transfer import TransferOptions
    from .diagnostics import InspectionError
    from .diagnostics.command import TextOptions
    from .training import HealingOptions, RecipeError
    from .training import heal as run_healing

    try:
        transfer_options = TransferOptions(
            granularity=granularity,
            tokens=calibration_tokens,
            length=calibration_length,
            test_tokens=test_tokens,
            seed=seed,
            keep_massive=keep_massive,
            device=device,
            overwrite=overwrite,
        )
        options = HealingOptions(
            transfer_options,
            tokens=tokens,
            length=length,
            batch=batch,
            learning_rate=learning_rate,
            sink_share=sink_share,
            activations=activations,
            copy_share=copy_share,
            sampled_share=sampled_share,
            chat_share=chat_share,
            bf16=bf16,
            smoothing=smoothing,
            texts=tuple(test or ()),
            dtype=dtype,
        )
        content, name = TextOptions(text=text).read()
        run_healing(Path(_with_demo_model([source])[0]), target, content, options, text_name=name, echo=typer.echo)
    except (ConversionError, InspectionError, RecipeError, OSError) as error:
        _fail(error)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="YAML file.")],
) -> None:
    """
    Train a model as a recipe says; --key value stands over the recipe's.

    Keys are those of the recipe (model, data, length, parameter_groups, ...: docs/training.md) and of Trainer (learning_rate, max_steps, ...); parts of a
    key are joined by dots: --lora.r 8, --data.0.path other.txt.
    """
    from accelerate import PartialState

    from .training import RecipeError, load_recipe
    from .training import train as run_recipe

    try:
        run_recipe(load_recipe(recipe, context.args), echo=typer.echo)
    except (RecipeError, OSError) as error:
        _fail(error)
    # gloo's threads may want the interpreter while it ends, which aborts a process that has done all its work.
    PartialState().destroy_process_group()


@app.command()
def study(
    study: Annotated[Path, typer.Argument(help="YAML file.")],
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of its models, tables and figures; default: named after the study.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Everything once, in minutes: its figures mean nothing.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings at once; default: one a core, eight at most, and one in all on a GPU."),
    ] = None,
) -> None:
    """
    Train a grid of small models and draw the paper's tables from it.

    What is finished is not trained again, and a run that was stopped goes on from its last checkpoint (docs/study.md).
    """
    from .conversion.errors import ConversionError
    from .diagnostics.errors import InspectionError
    from .study import StudyError, load_study, run_study, usual_jobs
    from .training import RecipeError

    try:
        plan = load_study(study, smoke)
        folder = folder or Path(plan.name + ("-smoke" if smoke else ""))
        run_study(plan, folder, echo=typer.echo, jobs=jobs or usual_jobs(plan))
    except (StudyError, RecipeError, ConversionError, InspectionError, OSError) as error:
        _fail(error)


@app.command()
def inspect(
    models: _Models,
    text: _Text = None,
    dataset: _Dataset = None,
    split: _Split = "test",
    column: _Column = "text",
    length: Annotated[int, typer.Option(help="Tokens in a window; F-Attn depends on it.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens to look at in all.")] = 16384,
    bos: _Bos = None,
    attention: Annotated[bool, typer.Option("--attention/--no-attention", help="Reduce attention maps.")] = True,
    map_layer: Annotated[
        list[int] | None, typer.Option(help="Layer whose attention map is drawn; may be repeated. Default: three.")
    ] = None,
    dtype: _Dtype = "auto",
    attn_implementation: Annotated[str | None, typer.Option(help="eager, sdpa, flex_attention, ...")] = None,
    device: _Device = None,
    trust_remote_code: _TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for inspection.json, figures and inspection.html.")] = None,
) -> None:
    """Show attention sinks, massive activations and gate scores of any causal language model."""
    from .diagnostics import InspectionError
    from .diagnostics.command import LoadOptions, TextOptions, run_inspection

    try:
        run_inspection(
            _with_demo_model(models),
            TextOptions(text, length, tokens, bos, dataset, split, column),
            LoadOptions(dtype, attn_implementation, device, trust_remote_code),
            attention=attention,
            map_layers=map_layer,
            out=out,
            echo=typer.echo,
        )
    except (InspectionError, OSError) as error:
        _fail(error)


@app.command()
def stream(
    models: _Models,
    text: _Text = None,
    length: Annotated[int, typer.Option(help="Tokens of the text, the BOS token included.")] = 8192,
    window: Annotated[int, typer.Option(help="Tokens that the cache holds.")] = 1024,
    kept: Annotated[int, typer.Option(help="First tokens that one of the runs keeps.")] = 4,
    bos: _Bos = None,
    dtype: _Dtype = "auto",
    device: _Device = None,
    trust_remote_code: _TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Perplexity with a cache of the last tokens only, with and without the first ones kept (StreamingLLM)."""
    from .diagnostics import InspectionError
    from .diagnostics.command import LoadOptions, TextOptions, run_streaming

    try:
        run_streaming(
            _with_demo_model(models),
            TextOptions(text, length, length, bos),
            LoadOptions(dtype, None, device, trust_remote_code),
            window=window,
            kept=kept,
            out=out,
            echo=typer.echo,
        )
    except (InspectionError, OSError) as error:
        _fail(error)


@app.command("low-bit")
def low_bit(
    models: _Models,
    text: _Text = None,
    dataset: _Dataset = None,
    split: _Split = "test",
    column: _Column = "text",
    length: Annotated[int, typer.Option(help="Tokens in a window; a scale a tensor is that of one window.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens to look at in all.")] = 16384,
    bos: _Bos = None,
    by_layer: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens to find out on which layers cost most, each rounded alone; a run a layer, so few. 0: leave it out.",
        ),
    ] = 0,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Regular expression: linear layers with such a name are not rounded; may be repeated."),
    ] = None,
    lm_head: Annotated[
        bool, typer.Option("--lm-head", help="Round the output head too, beside the decoder layers.")
    ] = False,
    torchao: Annotated[
        bool | None,
        typer.Option("--torchao/--no-torchao", help="Run torchao's dynamic int8 too; default: if it is installed."),
    ] = None,
    smoothing: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Try the model smoothed, too, so strongly (0.5 to 0.8): outliers go from inputs into weights, nothing else changes. 0: do not.",
        ),
    ] = 0.0,
    dtype: _Dtype = "auto",
    device: _Device = None,
    trust_remote_code: _TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for low_bit.json and figures.")] = None,
) -> None:
    """Perplexity with weights and activations of linear layers rounded to eight bits (W8A8), by how activations get their scale."""
    from .diagnostics.command import LoadOptions, TextOptions
    from .diagnostics.low_bit_command import LowBitOptions, run_low_bit

    with _comparing(out):
        run_low_bit(
            _with_demo_model(models),
            TextOptions(text, length, tokens, bos, dataset, split, column),
            LoadOptions(dtype, None, device, trust_remote_code),
            LowBitOptions(torchao, lm_head, tuple(keep or ()), by_layer, smoothing),
            out=out,
            echo=typer.echo,
        )


@app.command()
def copying(
    models: _Models,
    distance: Annotated[
        list[int] | None,
        typer.Option(help="Tokens from a token to its repeat; may be repeated.  [default: 32, 64, ..., 1024]"),
    ] = None,
    segment: Annotated[int, typer.Option(help="Tokens that are repeated in a sequence.")] = 32,
    sequences: Annotated[int, typer.Option(help="Sequences a distance.")] = 16,
    seed: Annotated[int, typer.Option(help="For the random tokens.")] = 0,
    bos: _Bos = None,
    dtype: _Dtype = "auto",
    device: _Device = None,
    trust_remote_code: _TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for copying.json and the figure.")] = None,
) -> None:
    """In-context copying: how well random tokens are predicted when they come again, by distance."""
    from .diagnostics.command import LoadOptions
    from .diagnostics.copying_command import CopyingOptions, run_copying

    options = CopyingOptions(segment=segment, sequences=sequences, seed=seed, bos=bos)
    if distance:
        options = replace(options, distances=tuple(distance))
    with _comparing(out):
        run_copying(
            _with_demo_model(models),
            LoadOptions(dtype, None, device, trust_remote_code),
            options,
            out=out,
            echo=typer.echo,
        )


@app.command()
def prompts(
    models: _Models,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file with a prompt a line; default: twenty short ones of our own.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 96,
    dtype: _Dtype = "auto",
    device: _Device = None,
    trust_remote_code: _TrustRemoteCode = False,
    out: Annotated[Path | None, typer.Option(help="Folder for prompts.json and the page prompts.md.")] = None,
) -> None:
    """Greedy answers to short prompts side by side: length, repetition, agreement with the first model's."""
    from .diagnostics.command import LoadOptions
    from .diagnostics.prompts_command import run_prompts

    with _comparing(out):
        run_prompts(
            _with_demo_model(models),
            LoadOptions(dtype, None, device, trust_remote_code),
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            out=out,
            echo=typer.echo,
        )


@contextmanager
def _comparing(out: Path | None) -> Iterator[None]:
    """Errors as one line; after an interruption, where the models that are done are."""
    from .diagnostics import InspectionError

    try:
        yield
    except (InspectionError, OSError) as error:
        _fail(error)
    except KeyboardInterrupt:
        where = "give --out to keep models that are done" if out is None else f"models that are done are in {out}"
        typer.echo(f"gated-attention: interrupted; {where}", err=True)
        raise typer.Exit(code=130) from None


app.command()(push)


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id; default: SmolLM2-135M-Instruct, dequantised from Q4_1 (93 MB to fetch)."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the models, the report and the figure.")] = Path(
        "demo-output"
    ),
    short: Annotated[bool, typer.Option("--short", help="Fewer tokens and steps.")] = False,
) -> None:
    """Convert a real model, show that nothing changed, generate, train, save and reload."""
    from .conversion import ConversionError
    from .demo import DemoError, run_demo

    try:
        run_demo(model, output, short)
    except (ConversionError, DemoError, OSError) as error:
        _fail(error)


def _with_demo_model(models: list[str]) -> list[str]:
    """The word `demo-model` stands for the demo's model, made on first use."""
    if "demo-model" not in models:
        return models
    from .demo import DemoError, demo_checkpoint

    try:
        return [str(demo_checkpoint()) if model == "demo-model" else model for model in models]
    except DemoError as error:
        _fail(error)


def _fail(error: Exception) -> None:
    typer.echo(f"gated-attention: {error}", err=True)
    raise typer.Exit(code=1) from error


def main() -> None:
    app()


if __name__ == "__main__":
    sys.exit(main())
