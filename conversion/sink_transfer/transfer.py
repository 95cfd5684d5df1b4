"""The calibrated conversion: gates that do the work of the attention sink from the first step."""

import logging
import math
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ...configuration import GatedAttentionConfig
from ..checkpoint import FLOAT_FORMATS, Checkpoint, read_checkpoint
from ..errors import ConversionError, NothingToTransferError
from ..gated_config import family_of
from ..places import check_apart, check_places
from ..plan import ConversionOptions, ConversionPlan, Granularity, Reading, options_from, plan_of, read_source
from ..staging import exclusive, staged_folder
from ..verify import audit_headers
from ..write import overwrite_tensors, write_conversion
from .calibrate import calibrate, perplexity_of
from .calibration import Calibration, calibration_windows
from .layer_source import LayerSource
from .report import TransferReport


# Those it was tried on: layers are opened up, and others differ inside.
FAMILIES_WITH_TRANSFER = ("llama", "mistral", "qwen3")

logger = logging.getLogger(__name__)

REPORT_FILE = "sink_transfer.json"
# Layers that are read back compute what they computed during the calibration, up to the order of sums.
READ_BACK_TOLERANCE = 1e-3


@dataclass(frozen=True)
class TransferOptions:
    """
    How sinks are transferred; one object serves the functions and the command line.

    Attributes:
        granularity: `"headwise"` (one gate a head) or `"elementwise"` (one gate a channel of a head).
        tokens: Calibration tokens.
        length: Tokens in a calibration window. How much of the attention a sink gets depends on the position, so windows should
            be about as long as the texts that the model will see.
        test_tokens: Tokens at the end of the text that are kept out of the calibration, for a test; 0 or at least one window.
        bos_share: Share of the windows that begin with BOS; the others begin within the text.
        attention_weight: What attention that is left on sinks costs against error. Larger: less sink, more error.
        seed: For the choice of windows.
        keep_massive: Whether the neurons that write massive activations stay as they are. By default they are made smaller, as far as
            that costs about half a percent of perplexity on held-out tokens, a whole one at most.
        on_disk: Whether the hidden states of the calibration tokens (up to 2.6 times `tokens * hidden_size` float32 numbers) lie in
            temporary files instead of memory. The fit of a layer needs up to four times that in memory besides (eight times,
            elementwise).
        device: Where layers run.
        overwrite: Whether a model folder at the target is replaced, as a whole.
    """

    granularity: Granularity = "headwise"
    tokens: int = 32768
    length: int = 512
    test_tokens: int = 0
    bos_share: float = 0.75
    attention_weight: float = 0.1
    seed: int = 0
    keep_massive: bool = False
    on_disk: bool = False
    device: str = "cpu"
    overwrite: bool = False

    def __post_init__(self):
        if self.granularity not in get_args(Granularity):
            raise ConversionError(f"`granularity` must be 'headwise' or 'elementwise', got {self.granularity!r}")
        if not (math.isfinite(self.attention_weight) and self.attention_weight >= 0):
            raise ConversionError(f"`attention_weight` must be a finite number from 0 on, got {self.attention_weight}")
        if not 0 <= self.seed < 2**63:
            raise ConversionError(f"`seed` must lie between 0 and 2**63, got {self.seed}")
        if self.test_tokens and self.test_tokens < self.length:
            raise ConversionError(
                f"`test_tokens` must be 0 or hold a window of `length` {self.length}, got {self.test_tokens}"
            )
        try:
            # Moments are summed in float64, which not every device has.
            torch.ones(1, device=self.device, dtype=torch.float64).item()
        except (RuntimeError, AssertionError, TypeError) as error:
            raise ConversionError(f"the device {self.device!r} cannot be used: {error}") from error


def transfer_sinks(
    source: str | os.PathLike,
    target: str | os.PathLike,
    text: str,
    options: TransferOptions | None = None,
    *,
    text_name: str | None = None,
    progress: bool = True,
    **fields,
) -> TransferReport:
    """
    Make a gated checkpoint in which gates do what the source's attention sinks do.

    Attention with a sink is gated attention without one (see `docs/sink-transfer.md`): the sink's value goes into biases, its
    key is turned away, and the gates are fitted to what the sink let through. Layers without a sink get identity gates.
    The result is a plain gated model, a little worse than the source until it is trained, with little attention left on any
    single token. The folder appears under its name only when it is complete; it holds the report as `sink_transfer.json`.

    Args:
        source (`str` or `os.PathLike`): Folder of a checkpoint of a supported family, with its tokenizer. Never written to.
        target (`str` or `os.PathLike`): Folder to make.
        text (`str`): Text to calibrate on, of the kind the model is for.
        options (`TransferOptions`, *optional*): How; or give its fields as keywords.
        text_name (`str`, *optional*): Name of the text, for the report.
        progress (`bool`): Whether to show a progress bar, on a terminal.

    Returns:
        [`TransferReport`]

    Raises:
        [`ConversionError`]: the source cannot be converted, or the text is too short. Nothing is left at `target` then, and what
        was there before is untouched.
        [`NothingToTransferError`]: the source has no sink.
    """
    options = options_from(TransferOptions, options, fields)
    source, target = Path(source), Path(os.path.abspath(target))
    check_apart(source, target)
    with exclusive(target):
        check_places(source, target, options.overwrite)
        reading = _read(source, options)
        calibration, tokenizer = _calibration(source, text, reading.config.vocab_size, options)
        plan = plan_of(
            reading,
            target,
            ConversionOptions(options.granularity, gate_bias=True, verify="headers", overwrite=options.overwrite),
        )
        for note in plan.notes:
            logger.warning("%s", note)
        with staged_folder(target) as folder:
            write_conversion(plan, folder, hard_links=False, resumable=False)
            report = _calibrate(
                reading,
                calibration,
                tokenizer,
                options,
                text_name,
                progress,
                on_layer=lambda index, tensors: _write_layer(plan, folder, tensors),
            )
            if not report.transferred:
                raise NothingToTransferError(f"nothing to transfer in {source}: {report.verdict}")
            audit_headers(plan, folder)
            _check_read_back(folder, plan.config, calibration, report, options.device)
            report.save(folder / REPORT_FILE)
    return report


def predict_transfer(
    source: str | os.PathLike,
    text: str,
    options: TransferOptions | None = None,
    *,
    text_name: str | None = None,
    progress: bool = True,
    **fields,
) -> TransferReport:
    """
    What [`transfer_sinks`] would do and give, judged on held-out tokens; nothing is written.

    Args and errors as there; a source without a sink is no error here.
    """
    options = options_from(TransferOptions, options, fields)
    reading = _read(Path(source), options)
    return _calibrate(
        reading, *_calibration(Path(source), text, reading.config.vocab_size, options), options, text_name, progress
    )


def _read(source: Path, options: TransferOptions) -> Reading:
    checkpoint = read_checkpoint(source, allow_pickled=True)
    _refuse_other_attention(checkpoint)
    family = family_of(checkpoint)
    if family.gates is not None:
        raise ConversionError(
            f"{checkpoint.folder} is of a family that already has gates ({family.model_type}); `gated-attention convert` reads them "
            "where every layer has attention"
        )
    if family.model_type not in FAMILIES_WITH_TRANSFER or not family.has_stock_class:
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'}: the transfer is made for {', '.join(FAMILIES_WITH_TRANSFER)} of transformers so "
            f"far, got {family.model_type}; `gated-attention convert` gives it gates that change nothing"
        )
    reading = read_source(checkpoint, options.granularity, gate_bias=True, biases=("v_bias", "o_bias"), gate_scale=1.0)
    if "sliding_attention" in reading.config.layer_types:
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'}: sliding_window {reading.config.sliding_window}: the transfer is made for layers "
            "that see the whole sequence: a sink that slides out of sight is none"
        )
    longest = reading.config.max_position_embeddings
    if options.length > longest:
        raise ConversionError(
            f"`length` must be at most {longest}, the model's max_position_embeddings, got {options.length}"
        )
    return reading


def _refuse_other_attention(checkpoint: Checkpoint) -> None:
    """Families where there is nothing to transfer get a better reason than that they are not supported."""
    learned = sorted(name for name in checkpoint.tensors if name.endswith((".sinks", ".attention_sink_bias")))
    if learned:
        raise ConversionError(
            f"{checkpoint.folder} has learned sinks of its own ({learned[0]}): its attention can go nowhere without a token "
            "that it rests on, so there is no sink to transfer"
        )
    linear = "linear_attention" in (checkpoint.config.get("layer_types") or ())
    if linear or checkpoint.config.get("model_type") in ("mamba", "mamba2", "rwkv"):
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'}: {checkpoint.config.get('model_type')} has layers of linear attention or "
            "recurrence, which have no attention sink; the transfer is for models of full softmax attention"
        )


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """
    The tokenizer in the source's folder.

    Raises:
        `ConversionError`: there is none that can be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # the tokenizers library raises plain ones
        raise ConversionError(
            f"{source} has no tokenizer that can be loaded, which the calibration needs: {error}"
        ) from error


def _calibration(
    source: Path, text: str, vocab_size: int, options: TransferOptions
) -> tuple[Calibration, PreTrainedTokenizerBase]:
    tokenizer = load_tokenizer(source)
    calibration = calibration_windows(
        tokenizer, text, options.tokens, options.length, options.test_tokens, options.bos_share, options.seed
    )
    largest = int(calibration.input_ids.max())
    if largest >= vocab_size:
        raise ConversionError(
            f"the tokenizer in {source} gives token {largest}, the model's vocab_size is {vocab_size}: they do not belong together"
        )
    return calibration, tokenizer


def _calibrate(
    reading: Reading, calibration, tokenizer, options, text_name, progress, on_layer=None
) -> TransferReport:
    with tempfile.TemporaryDirectory(prefix="gated_attention-") if options.on_disk else nullcontext() as scratch:
        return calibrate(
            reading.checkpoint,
            reading.config,
            calibration,
            granularity=options.granularity,
            attention_weight=options.attention_weight,
            seed=options.seed,
            keep_massive=options.keep_massive,
            text_name=text_name,
            tokenizer=tokenizer,
            on_layer=on_layer,
            scratch=Path(scratch) if scratch else None,
            device=options.device,
            progress=progress,
        )


def _write_layer(plan: ConversionPlan, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put a layer's tensors in the place of the source's, or of the zeros that were written for them."""
    headers = plan.source.tensors | plan.new_tensors
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        files.setdefault(plan.weight_map[name], {})[name] = tensor.to(FLOAT_FORMATS[headers[name].dtype])
    for file, content in files.items():
        overwrite_tensors(folder / file, content)


def _check_read_back(
    folder: Path, config: GatedAttentionConfig, calibration: Calibration, report: TransferReport, device: str
) -> None:
    """
    Run the held-out windows through what was written.

    Raises:
        `ConversionError`: it is not the model that was fitted.
    """
    found = perplexity_of(LayerSource(read_checkpoint(folder), config, device), calibration.held_out_ids)
    if not abs(found / report.perplexity[1] - 1) <= READ_BACK_TOLERANCE:
        raise ConversionError(
            f"what was written has a perplexity of {found:.4f} where {report.perplexity[1]:.4f} was fitted; nothing was kept. "
            "Please report this with the source's config.json"
        )
