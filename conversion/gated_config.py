"""What a checkpoint is, and the config of its gated twin."""

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..configuration import GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from ..modeling_gated.bundle import AUTO_MAP
from ..modeling_gated.gate import is_gate_tensor
from .checkpoint import FLOAT_FORMATS, Checkpoint, TensorHeader, is_ignored_on_load
from .errors import ConversionError
from .families import FAMILIES, Family


# 2 * sigmoid(0) = 1 in every float format: zero weights are the identity, at the gate's steepest point.
IDENTITY_SCALE = 2.0


def family_of(checkpoint: Checkpoint) -> Family:
    """
    The family of a checkpoint.

    Raises:
        `ConversionError`: it has gates already, is quantised, or is of no supported family or architecture.
    """
    config, where = checkpoint.config, checkpoint.folder / "config.json"
    model_type = config.get("model_type")
    gated = sorted(name for name in checkpoint.tensors if is_gate_tensor(name))
    if model_type == GatedAttentionConfig.model_type or gated:
        what = f"model_type {model_type!r}" + (f", tensor {gated[0]}" if gated else "")
        raise ConversionError(f"{checkpoint.folder} already has gates ({what}); converting it again would gate twice")
    if model_type not in FAMILIES:
        raise ConversionError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    architectures = config.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise ConversionError(
            f"{where}: architectures must be [{family.architecture!r}], got {architectures}; save the causal language model"
        )
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "unknown method") if isinstance(quantization, dict) else quantization
        raise ConversionError(
            f"{where}: the checkpoint is quantised ({method}); dequantise it first (load it in transformers, "
            "`model.dequantize()`, `save_pretrained`), or convert the original"
        )
    return family


def gated_config(
    checkpoint: Checkpoint,
    family: Family,
    granularity: str,
    gate_bias: bool,
    gate_scale: float,
    biases: tuple[str, ...] = (),
) -> tuple[GatedAttentionConfig, dict[str, tuple[int, ...]]]:
    """
    The gated model's config, and the shape of each of its tensors.

    Args:
        checkpoint, family: The source.
        granularity, gate_bias, gate_scale: Of the gates.
        biases: Switches of the config (`"v_bias"`, `"o_bias"`) that are turned on whether the source has them or not.

    Raises:
        `ConversionError`: the source's config does not describe a model that can be built, or RoPE would differ.
    """
    try:
        source_config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        # As when the model is built: some fields that lie outside `rope_parameters` are moved into it.
        source_config.standardize_rope_params()
        _refuse_windows(checkpoint, source_config)
        config = _translate(checkpoint, family, source_config, granularity, gate_bias, gate_scale, biases)
        with torch.device("meta"):
            model = GatedAttentionForCausalLM(config)
        _compare_rope(checkpoint, source_config, config)
    except ConversionError:
        raise
    except Exception as error:  # whatever a config can break: KeyError for an unknown activation, among others
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'} does not describe a model that can be built: {type(error).__name__}: {error}"
        ) from error
    return config, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _refuse_windows(checkpoint: Checkpoint, source_config) -> None:
    window = getattr(source_config, "sliding_window", None)
    other = set(getattr(source_config, "layer_types", None) or ()) - {"full_attention"}
    if window is not None or other:
        what = f"sliding_window {window}" if window is not None else f"layer_types {sorted(other)}"
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'}: {what}: layers that do not see the whole sequence are not supported; "
            "supported are models whose every layer has full attention"
        )


def _translate(
    checkpoint,
    family: Family,
    source_config,
    granularity: str,
    gate_bias: bool,
    gate_scale: float,
    biases: tuple[str, ...],
) -> GatedAttentionConfig:
    fields = {ours: getattr(source_config, theirs) for ours, theirs in family.config_fields.items()}
    fields |= dict.fromkeys(biases, True)
    extra = {}
    if getattr(source_config, "tokenizer_class", None):
        # AutoTokenizer reads it where tokenizer_config.json does not name a class.
        extra["tokenizer_class"] = source_config.tokenizer_class
    return GatedAttentionConfig(
        **fields,
        **family.fixed_fields,
        **extra,
        gate_granularity=granularity,
        gate_bias=gate_bias,
        gate_scale=gate_scale,
        dtype=_dtype_as_loaded(checkpoint, source_config),
        architectures=[GatedAttentionForCausalLM.__name__],
        auto_map=dict(AUTO_MAP),
    )


def _compare_rope(checkpoint: Checkpoint, source_config, config: GatedAttentionConfig) -> None:
    """RoPE has no tensors that an audit of headers would compare, and many forms of config."""
    theirs, ours = LlamaRotaryEmbedding(source_config), LlamaRotaryEmbedding(config)
    if not torch.equal(theirs.inv_freq, ours.inv_freq) or theirs.attention_scaling != ours.attention_scaling:
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'}: its RoPE ({source_config.rope_parameters}) could not be carried over"
        )


def _dtype_as_loaded(checkpoint: Checkpoint, source_config) -> torch.dtype:
    """
    The dtype transformers loads the source in. Without one in its config, that is the index's, or the format of the first
    tensor of the first file; written down, it no longer depends on what the new files list first.
    """
    if source_config.dtype is not None:
        return source_config.dtype
    if "dtype" in checkpoint.index_metadata:
        return getattr(torch, checkpoint.index_metadata["dtype"])
    first = checkpoint.shards[0].tensors
    return FLOAT_FORMATS[first[min(first)].dtype]


_BIASES = {"v_bias": "v_proj.bias", "o_bias": "o_proj.bias"}


def new_names(
    checkpoint: Checkpoint, family: Family, shapes: dict[str, tuple[int, ...]], biases: tuple[str, ...] = ()
) -> set[str]:
    """
    Names of the tensors that the source has no counterpart of: the gates and, of the `biases` that are turned on, those that
    the source's config does not have.
    """
    added = [_BIASES[name] for name in biases if not checkpoint.config.get(family.config_fields.get(name), False)]
    projections = ("g_proj.weight", "g_proj.bias", *added)
    return {name for name in shapes if name.rpartition(".self_attn.")[2] in projections}


def new_headers(
    checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], names: set[str]
) -> dict[str, TensorHeader]:
    """Headers of the new tensors; each takes the format of its layer's `q_proj`."""
    headers = {}
    for name in names:
        layer = name.rpartition(".self_attn.")[0]
        headers[name] = TensorHeader(checkpoint.tensors[f"{layer}.self_attn.q_proj.weight"].dtype, shapes[name])
    # Wide formats first keeps every tensor aligned to its own width.
    return dict(sorted(headers.items(), key=lambda item: (-FLOAT_FORMATS[item[1].dtype].itemsize, item[0])))


def audit_names_and_shapes(
    checkpoint: Checkpoint, config, expected: dict[str, tuple[int, ...]], new: set[str]
) -> None:
    """
    Check that the source holds the tensors that its config describes, those that are `new` apart.

    Raises:
        `ConversionError`: a tensor is missing, has another shape, or has no place in the model.
    """
    found = {name: header.shape for name, header in checkpoint.tensors.items()}
    missing = expected.keys() - found.keys() - new
    if config.tie_word_embeddings:
        missing -= set(GatedAttentionForCausalLM._tied_weights_keys)
    unexpected = {name for name in found.keys() - expected.keys() if not is_ignored_on_load(name)}
    problems = [f"{name} is missing" for name in sorted(missing)]
    if "lm_head.weight" in missing:
        problems.append(
            "the config says that the head is not tied (tie_word_embeddings false), so it cannot be taken from the embedding"
        )
    problems += [f"{name} has no place in a {checkpoint.config['model_type']} model" for name in sorted(unexpected)]
    problems += [
        f"{name} has shape {found[name]}, the config implies {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ConversionError(
            f"the tensors in {checkpoint.folder} are not those that its config.json describes: {shown}. Fetch it again"
        )


def generation_settings(checkpoint: Checkpoint) -> dict | None:
    """
    Generation settings that the source keeps in config.json, where old checkpoints have them and transformers reads them
    if there is no generation_config.json. A config that is saved today may not hold them, so they get their own file.
    """
    if (checkpoint.folder / "generation_config.json").exists():
        return None
    defaults = GenerationConfig().to_dict()
    not_generation = {
        "transformers_version",
        "output_attentions",
        "output_hidden_states",
        "return_dict_in_generate",
    }
    found = {key: value for key, value in checkpoint.config.items() if key in defaults and key not in not_generation}
    token_ids = {"bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"}
    if not found.keys() - token_ids:
        return None
    return {"_from_model_config": True, **found}
