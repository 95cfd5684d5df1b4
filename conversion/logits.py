"""Runs a source and its gated twin on the same tokens and compares what comes out, layer by layer."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import transformers
from safetensors import safe_open
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..configuration import GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from ..modeling_gated.attention import GatedAttention
from .checkpoint import Checkpoint, read_checkpoint
from .errors import ConversionError
from .plan import ConversionPlan
from .rejoin import rejoin_projections


# Whole models are loaded where one takes at most this part of the memory that is free; what is compared takes as much again.
_WHOLE_MODEL_SHARE = 1 / 3

# Windows longer than this are said to be uncompared: one layer's attention over them takes minutes.
LONGEST_WINDOW = 8192


@dataclass(frozen=True)
class LayerDifference:
    """
    How far the outputs of a layer are apart.

    Attributes:
        layer: Its index.
        largest: Largest difference.
        ulps: Largest difference in units in the last place, of numbers that are not tiny beside the largest.
        magnitude: Largest output.
    """

    layer: int
    largest: float
    ulps: int
    magnitude: float


@dataclass(frozen=True)
class Comparison:
    """
    What was found when the models ran.

    Attributes:
        method: `"whole models"`: differences add up from layer to layer. `"layer by layer"`: each layer got the same input; the
            head, whose numbers are compared elsewhere, did not run.
        dtype: What the models ran in.
        lengths: How many tokens they ran on.
        layers: One entry a layer.
        logits: Largest difference of the logits, where whole models ran.
        window_seen: Whether some tokens lay outside of the sliding window; `None` if there is none.
        rejoined: Whether projections that the conversion took apart were put together again.
    """

    method: str
    dtype: str
    lengths: tuple[int, ...]
    layers: tuple[LayerDifference, ...]
    logits: float | None
    window_seen: bool | None
    rejoined: bool


def compare_models(plan: ConversionPlan, folder: Path, layer_by_layer: bool | None = None) -> Comparison | None:
    """
    Run source and result on random tokens, of two lengths and past a sliding window, and compare what each layer and the head
    give, bit for bit, in the checkpoint's own dtype (or the family's `compared_in`). Projections that the conversion took apart
    are put together again for this ([`rejoin_projections`]): apart they may round otherwise.

    Args:
        plan: What was converted.
        folder: Where the result is.
        layer_by_layer: Whether one layer of each is loaded at a time. By default where the models are large for the memory
            that is free.

    Returns:
        [`Comparison`], or `None` if there is no class that the source could be run with.

    Raises:
        `ConversionError`: source or result does not load cleanly, the source cannot be run, or outputs differ.
    """
    if plan.pieces and not plan.family.has_stock_class:
        _load_alone(plan, folder)
        return None
    if layer_by_layer is None:
        layer_by_layer = plan.source_bytes > _WHOLE_MODEL_SHARE * psutil.virtual_memory().available
    with torch.no_grad(), _quiet():
        return (_compare_layers if layer_by_layer else _compare_whole)(plan, folder)


def _batches(plan: ConversionPlan) -> list[torch.Tensor]:
    """Random tokens: a short batch, a single longer text, and one that reaches past the window."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 48), (1, 7)]
    window = plan.config.sliding_window
    if "sliding_attention" in plan.config.layer_types and 48 <= window + 8 <= LONGEST_WINDOW:
        sizes.append((1, window + 8))
    return [torch.randint(plan.config.vocab_size, size, generator=generator) for size in sizes]


def _window_seen(plan: ConversionPlan, batches: list[torch.Tensor]) -> bool | None:
    if "sliding_attention" not in plan.config.layer_types:
        return None
    return max(batch.shape[1] for batch in batches) > plan.config.sliding_window


def _rejoined(plan: ConversionPlan) -> bool:
    return bool(plan.family.fused) or (plan.family.gates or "").startswith("q_proj")


def _dtype(plan: ConversionPlan) -> torch.dtype | str:
    return getattr(torch, plan.family.compared_in) if plan.family.compared_in else "auto"


def ulp_distance(first: torch.Tensor, second: torch.Tensor) -> int:
    """
    Largest number of representable numbers between two tensors' entries. Entries below a thousandth of the largest one are left
    out: beside it their last places mean nothing.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.contiguous().view(integer).long()
        smallest = torch.iinfo(integer).min
        return torch.where(bits < 0, smallest - bits, bits)

    size = second.float().abs()
    counted = (size > 1e-3 * size.nan_to_num(0, 0, 0).max()) & first.isfinite() & second.isfinite()
    if not counted.any():
        return 0
    return int((ordered(first) - ordered(second)).abs()[counted].max())


def _difference(where: str, found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """
    The largest difference and the largest output.

    Raises:
        `ConversionError`: they differ.
    """
    if found.dtype != expected.dtype:
        raise ConversionError(f"the source runs in {expected.dtype}, the converted checkpoint in {found.dtype}")
    if not expected.isfinite().any():
        raise ConversionError(
            f"the source's own {where} are all NaN or infinite in {expected.dtype}, so comparing them would show nothing; look "
            'at the source, or use --verify headers (verify="headers")'
        )
    magnitude = expected.abs().nan_to_num(0, 0, 0).max().item()
    # NaN where the source has NaN (float16 overflow, say) is the same function.
    largest = (found.float() - expected.float()).abs().nan_to_num(0, 0, 0).max().item()
    if not torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True):
        raise ConversionError(
            f"the converted checkpoint's {where} differ from the source's by up to {largest:g} (the largest is {magnitude:g}); "
            "nothing was kept. Please report this with the source's config.json"
        )
    return largest, magnitude


def _of_layers(layer: int, found: list[torch.Tensor], expected: list[torch.Tensor]) -> LayerDifference:
    pairs = list(zip(found, expected, strict=True))
    differences = [_difference(f"outputs of layer {layer}", *pair) for pair in pairs]
    return LayerDifference(
        layer,
        max(largest for largest, _ in differences),
        max(ulp_distance(*pair) for pair in pairs),
        max(magnitude for _, magnitude in differences),
    )


# ---- whole models


def _compare_whole(plan: ConversionPlan, folder: Path) -> Comparison:
    batches = _batches(plan)
    # One at a time: twice the checkpoint need not fit in memory.
    with _errors_of_the_source(plan):
        expected = _run(_load_source(plan), batches)
    model = _load_result(plan, folder)
    _prepare(model, plan)
    found = _run(model, batches)
    layers = []
    for layer in range(plan.config.num_hidden_layers - 1):
        states = [[outputs.hidden_states[layer + 1] for outputs in run] for run in (found, expected)]
        layers.append(_of_layers(layer, *states))
    # The last entry is what the final norm made of the last layer's output.
    last = [[outputs.hidden_states[-1] for outputs in run] for run in (found, expected)]
    layers.append(_of_layers(plan.config.num_hidden_layers - 1, *last))
    logits = max(
        _difference("logits", ours.logits, theirs.logits)[0] for ours, theirs in zip(found, expected, strict=True)
    )
    return Comparison(
        method="whole models",
        dtype=str(expected[0].logits.dtype).removeprefix("torch."),
        lengths=tuple(batch.shape[1] for batch in batches),
        layers=tuple(layers),
        logits=logits,
        window_seen=_window_seen(plan, batches),
        rejoined=_rejoined(plan),
    )


def _run(model: PreTrainedModel, batches: list[torch.Tensor]) -> list:
    return [model(batch, use_cache=False, output_hidden_states=True) for batch in batches]


def _load_source(plan: ConversionPlan) -> PreTrainedModel:
    if plan.family.has_stock_class:
        model_class = getattr(transformers, plan.family.architecture)
        return _load(model_class, plan.source.folder, "source", dtype=_dtype(plan))
    return _load(
        GatedAttentionForCausalLM,
        plan.source.folder,
        "source",
        config=_without_gates(plan.config),
        dtype=_dtype(plan),
    )


@contextmanager
def _errors_of_the_source(plan: ConversionPlan) -> Iterator[None]:
    """What a stock class cannot load or run is the source's fault, and may be anything."""
    try:
        yield
    except (ConversionError, MemoryError):
        raise
    except Exception as error:
        raise ConversionError(
            f"{plan.family.architecture} cannot run the source {plan.source.folder} ({type(error).__name__}: {error}), so its "
            'logits cannot be compared; look at the source, or use --verify headers (verify="headers")'
        ) from error


def _without_gates(config: GatedAttentionConfig) -> GatedAttentionConfig:
    """Tensors that stay as they are make up the same model without the gates."""
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("gate_")}
    return GatedAttentionConfig(**fields, gate_positions=[])


def _load_result(plan: ConversionPlan, folder: Path) -> PreTrainedModel:
    return _load(GatedAttentionForCausalLM, folder, "converted checkpoint", dtype=_dtype(plan))


def _load(model_class: type, folder: Path | None, what: str, **options) -> PreTrainedModel:
    """
    A model, in evaluation mode.

    Raises:
        `ConversionError`: a tensor is missing, unexpected, or of another shape; of a single layer only its own count.
    """
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
    leftovers = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if folder is None:
        missing = [name for name in leftovers.pop("missing_keys", ()) if ".layers." in name]
        leftovers |= {"missing_keys": missing} if missing else {}
    if leftovers:
        raise ConversionError(f"the {what} does not load cleanly: {leftovers}")
    return model.eval()


def _prepare(model: PreTrainedModel, plan: ConversionPlan) -> None:
    """Let a model compute what can be equal to the source."""
    rejoin_projections(model, plan)
    if plan.options.init != "identity":
        for module in model.modules():
            if isinstance(module, GatedAttention):
                module.gate_positions = ()


def _load_alone(plan: ConversionPlan, folder: Path) -> None:
    with torch.no_grad(), _quiet():
        logits = _load_result(plan, folder)(_batches(plan)[0], use_cache=False).logits
    if not logits.isfinite().any():
        raise ConversionError(f"the converted checkpoint's logits are all NaN or infinite in {logits.dtype}")


# ---- layer by layer


class _Layers:
    """One layer at a time of a checkpoint, as a model of a single layer."""

    def __init__(self, checkpoint: Checkpoint, model_class: type, config, dtype: torch.dtype, stack: ExitStack):
        self.model_class, self.config, self.dtype = model_class, config, dtype
        self.files = {}
        for shard in checkpoint.shards:
            file = stack.enter_context(safe_open(shard.path, "pt"))
            self.files |= dict.fromkeys(shard.tensors, file)
        # The language model of a model with images has a longer name.
        self.prefix = next(name for name in self.files if ".layers." in name).partition(".layers.")[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, of which a few are read."""
        table = self.files[f"{self.prefix}.embed_tokens.weight"].get_slice(f"{self.prefix}.embed_tokens.weight")
        rows = {token: table[token : token + 1] for token in set(input_ids.flatten().tolist())}
        states = torch.cat([rows[token] for token in input_ids.flatten().tolist()])
        return states.view(*input_ids.shape, -1).to(self.dtype)

    def layer(self, index: int) -> PreTrainedModel:
        """A model of one layer; the last one's has the final norm too."""
        last = index == self.config.num_hidden_layers - 1
        prefix = f"{self.prefix}.layers.{index}."
        tensors = {
            name.replace(prefix, f"{self.prefix}.layers.0."): file.get_tensor(name)
            for name, file in self.files.items()
            if name.startswith(prefix)
            or (last and name.startswith(f"{self.prefix}.") and "norm." in name and ".layers." not in name)
        }
        model = _load(
            self.model_class,
            None,
            f"layer {index}",
            config=one_layer_config(self.config, index),
            state_dict=tensors,
            dtype=self.dtype,
        )
        if not last:
            base = model.base_model
            for name, module in base.named_children():
                if "norm" in name and not isinstance(module, nn.ModuleList):
                    setattr(base, name, nn.Identity())
        return model


def one_layer_config(config, index: int):
    """The config of a model whose only layer is layer `index` of `config`'s. Its vocabulary is empty, or nearly so."""
    single = deepcopy(config)
    count = config.num_hidden_layers
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == count and name in _BY_LAYER:
            setattr(single, name, [value[index]])
    dense = getattr(config, "mlp_only_layers", None)
    if dense is not None:
        sparse = index not in dense and (index + 1) % config.decoder_sparse_step == 0
        single.mlp_only_layers, single.decoder_sparse_step = ([] if sparse else [0]), 1
    if getattr(config, "gate_layers", None) is not None:
        gated = index in config.gate_layers
        single.gate_layers = [0] if gated else None
        single.gate_positions = config.gate_positions if gated else []
    if index > 0 and hasattr(config, "embedding_multiplier"):
        single.embedding_multiplier = 1.0
    single.num_hidden_layers, single.vocab_size = 1, 8
    single.pad_token_id = single.bos_token_id = single.eos_token_id = None
    return single


_BY_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


def _compare_layers(plan: ConversionPlan, folder: Path) -> Comparison:
    batches = _batches(plan)
    dtype = plan.config.dtype if _dtype(plan) == "auto" else _dtype(plan)
    if plan.family.has_stock_class:
        source_class = getattr(transformers, plan.family.architecture)
        source_config = AutoConfig.from_pretrained(plan.source.folder)
    else:
        source_class, source_config = GatedAttentionForCausalLM, _without_gates(plan.config)
    config = AutoConfig.from_pretrained(folder)
    layers = []
    with ExitStack() as stack:
        source = _Layers(plan.source, source_class, source_config, dtype, stack)
        result = _Layers(read_checkpoint(folder), GatedAttentionForCausalLM, config, dtype, stack)
        states = [source.embed(batch) for batch in batches]
        for theirs, ours in zip(states, [result.embed(batch) for batch in batches], strict=True):
            _difference("embeddings", ours, theirs)
        for index in tqdm(range(config.num_hidden_layers), desc="Comparing", unit="layer", disable=None):
            with _errors_of_the_source(plan):
                expected = _run_layer(source.layer(index), states)
            layer = result.layer(index)
            _prepare(layer, plan)
            found = _run_layer(layer, states)
            del layer
            layers.append(_of_layers(index, found, expected))
            states = expected
    return Comparison(
        method="layer by layer",
        dtype=str(dtype).removeprefix("torch."),
        lengths=tuple(batch.shape[1] for batch in batches),
        layers=tuple(layers),
        logits=None,
        window_seen=_window_seen(plan, batches),
        rejoined=_rejoined(plan),
    )


def _run_layer(model: PreTrainedModel, states: list[torch.Tensor]) -> list[torch.Tensor]:
    return [model.base_model(inputs_embeds=one, use_cache=False).last_hidden_state for one in states]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, and its reports of tensors that one layer does not have."""
    enabled, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if enabled:
            transformers_logging.enable_progress_bar()
