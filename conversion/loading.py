"""Loads a source, its result, or one layer of each, so that both compute what can be compared bit for bit."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..configuration import GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from ..modeling_gated.attention import GatedAttention
from .checkpoint import Checkpoint
from .errors import ConversionError
from .plan import ConversionPlan
from .rejoin import rejoin_projections


def dtype_to_compare_in(plan: ConversionPlan) -> torch.dtype | str:
    """The checkpoint's own, unless its family computes the same bits in another one only."""
    return getattr(torch, plan.family.compared_in) if plan.family.compared_in else "auto"


def source_class(plan: ConversionPlan) -> type:
    """The class that the source is run with. Without a stock class, and with its tensors as they are: ours, without gates."""
    return (
        getattr(transformers, plan.family.architecture) if plan.family.has_stock_class else GatedAttentionForCausalLM
    )


def load_source(plan: ConversionPlan) -> PreTrainedModel:
    options = {} if plan.family.has_stock_class else {"config": without_gates(plan.config)}
    return load(source_class(plan), plan.source.folder, "source", dtype=dtype_to_compare_in(plan), **options)


def without_gates(config: GatedAttentionConfig) -> GatedAttentionConfig:
    """The config of the same model without gates."""
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith("gate_")}
    return GatedAttentionConfig(**fields, gate_positions=[])


def load_result(plan: ConversionPlan, folder: Path) -> PreTrainedModel:
    return load(GatedAttentionForCausalLM, folder, "converted checkpoint", dtype=dtype_to_compare_in(plan))


def load(model_class: type, folder: Path | None, what: str, **options) -> PreTrainedModel:
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


def prepare_result(model: PreTrainedModel, plan: ConversionPlan) -> None:
    """Let the result, or a layer of it, compute what can be equal to the source."""
    rejoin_projections(model, plan)
    if plan.options.init != "identity":
        for module in model.modules():
            if isinstance(module, GatedAttention):
                module.gate_positions = ()


class Layers:
    """One layer at a time of a checkpoint, as a model of a single layer."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        is_left_out: Callable[[str], bool],
        model_class: type,
        config,
        dtype: torch.dtype,
        stack: ExitStack,
    ):
        self.model_class, self.config, self.dtype = model_class, config, dtype
        self.files = {}
        for shard in checkpoint.shards:
            file = stack.enter_context(shard.open())
            kept = [name for name in shard.tensors if not is_left_out(name)]
            self.files |= dict.fromkeys(kept, file)
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
        model = load(
            self.model_class,
            None,
            f"layer {index}",
            config=one_layer_config(self.config, index),
            state_dict=tensors,
            dtype=self.dtype,
        )
        if not last:
            remove_final_norm(model)
        return model


def remove_final_norm(model: PreTrainedModel) -> None:
    """Let a model end with its last layer."""
    base = model.base_model
    for name, module in base.named_children():
        if "norm" in name and not isinstance(module, nn.ModuleList):
            setattr(base, name, nn.Identity())


def one_layer_config(config, index: int):
    """The config of a model whose only layer is layer `index` of `config`'s. Its vocabulary is empty, or nearly so."""
    single = deepcopy(config)
    count = config.num_hidden_layers
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == count and name in _BY_LAYER:
            setattr(single, name, [value[index]])
    dense = getattr(config, "mlp_only_layers", None)
    if dense is not None:
        sparse = index not in dense and (index + 1) % getattr(config, "decoder_sparse_step", 1) == 0
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


@contextmanager
def errors_of_the_source(plan: ConversionPlan) -> Iterator[None]:
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


@contextmanager
def quiet() -> Iterator[None]:
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
