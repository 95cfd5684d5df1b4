"""What a checkpoint is, and the config of its gated twin."""

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.lfm3.modeling_lfm3 import Lfm3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ..configuration import GatedAttentionConfig
from ..modeling_gated import GatedAttentionForCausalLM
from ..modeling_gated.bundle import AUTO_MAP
from ..modeling_gated.expert_tensors import EXPERT_TENSORS, expert_problems, names_on_disk
from ..modeling_gated.gate import is_gate_tensor
from .checkpoint import FLOAT_FORMATS, Checkpoint, TensorHeader
from .errors import ConversionError
from .families import FAMILIES, GATE_FLAGS, REFUSED_FAMILIES, Family, family_for
from .gate_starts import IDENTITY_SCALE
from .layouts import Piece, fused_rows, is_dropped, renamed, rows_of_fused


def family_of(checkpoint: Checkpoint) -> Family:
    """
    The family of a checkpoint.

    Raises:
        `ConversionError`: it has gates already, is quantised, or is of no supported family or architecture.
    """
    config, where = checkpoint.config, checkpoint.folder / "config.json"
    model_type = config.get("model_type")
    family = family_for(config)
    gated = sorted(name for name in checkpoint.tensors if is_gate_tensor(name))
    if model_type == GatedAttentionConfig.model_type or (gated and (family is None or family.gates != "g_proj")):
        what = f"model_type {model_type!r}" + (f", tensor {gated[0]}" if gated else "")
        raise ConversionError(f"{checkpoint.folder} already has gates ({what}); converting it again would gate twice")
    if family is None:
        reason = f": {REFUSED_FAMILIES[model_type]}" if model_type in REFUSED_FAMILIES else ""
        raise ConversionError(
            f"{where}: model_type {model_type!r} is not supported{reason}; supported: {', '.join(sorted(FAMILIES))}"
        )
    flags = [name for name in GATE_FLAGS if config.get(name)]
    if len(flags) > 1:
        raise ConversionError(
            f"{where}: {' and '.join(flags)} are both set, but a gate is either one a head or one a channel; {_fused_facts(checkpoint)}"
            ": unset the flag that does not fit"
        )
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


def _fused_facts(checkpoint: Checkpoint) -> str:
    """What the shape of a fused `q_proj` says of the gates in it."""
    name = next(
        (name for name in checkpoint.tensors if ".layers." in name and name.endswith(".self_attn.q_proj.weight")), None
    )
    if name is None:
        return "no q_proj.weight was found"
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        rows = {
            kind: fused_rows(config, granularity)
            for kind, granularity in (("headwise", "headwise"), ("elementwise", "elementwise"), ("no", None))
        }
    except Exception:  # whatever a config can break; the fact is still worth saying
        return f"{name} has the shape {checkpoint.tensors[name].shape}"
    found = checkpoint.tensors[name].shape[0]
    meaning = next((f" ({kind} gates)" for kind, count in rows.items() if count == found), "")
    implied = ", ".join(f"{count} rows with {kind} gates" for kind, count in rows.items())
    return f"{name} has {found} rows{meaning}, and should have {implied}"


def gated_config(
    checkpoint: Checkpoint,
    family: Family,
    granularity: str | None,
    gate_bias: bool,
    gate_scale: float,
    biases: tuple[str, ...] = (),
) -> tuple[GatedAttentionConfig, dict[str, tuple[int, ...]]]:
    """
    The gated model's config, and the shape of each tensor of its checkpoint.

    Args:
        checkpoint, family: The source.
        granularity, gate_bias, gate_scale: Of the gates; of a family that has its own, they are the family's.
        biases: Switches of the config (`"v_bias"`, `"o_bias"`) that are turned on whether the source has them or not.

    Raises:
        `ConversionError`: the source's config does not describe a model that can be built, or RoPE would differ.
    """
    try:
        source_config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        # As when the model is built: some fields that lie outside `rope_parameters` are moved into it.
        source_config.standardize_rope_params()
        _refuse_other_layers(checkpoint, family, source_config)
        config = _translate(checkpoint, family, source_config, granularity, gate_bias, gate_scale, biases)
        with torch.device("meta"):
            model = GatedAttentionForCausalLM(config)
        _compare_rope(checkpoint, family, source_config, config)
    except ConversionError:
        raise
    except Exception as error:  # whatever a config can break: KeyError for an unknown activation, among others
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'} does not describe a model that can be built: {type(error).__name__}: {error}"
        ) from error
    return config, names_on_disk({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})


def _refuse_other_layers(checkpoint: Checkpoint, family: Family, source_config) -> None:
    where = checkpoint.folder / "config.json"
    kinds = set(getattr(source_config, "layer_types", None) or ())
    without_softmax = sorted(kinds - {"full_attention", "sliding_attention"})
    if without_softmax:
        raise ConversionError(
            f"{where}: layer_types has {', '.join(without_softmax)}: such a hybrid is not a decoder of attention layers alone and "
            f"stays what it is, {family.architecture} of transformers. `gated-attention inspect {checkpoint.folder}` shows its "
            "sinks, activations and gates"
        )
    for name, value in family.refused_fields.items():
        found = getattr(source_config, name, value)
        if found != value:
            raise ConversionError(
                f"{where}: {name} must be {value} for a {family.model_type} checkpoint to be read, got {found}: the gated model "
                "has no counterpart of it"
            )
    rope = source_config.rope_parameters
    if "sliding_attention" in kinds and rope.get("sliding_attention") != rope.get("full_attention"):
        raise ConversionError(
            f"{where}: layer_types has sliding_attention, with a RoPE of its own; the gated model has one RoPE for all layers"
        )


def _window_fields(family: Family, source_config) -> dict:
    """The source's sliding windows, layer by layer where it says so."""
    window = getattr(source_config, "sliding_window", None) or None
    layer_types = getattr(source_config, "layer_types", None)
    if family.windows == "every_layer" or layer_types is None:
        return {"sliding_window": window if family.windows == "every_layer" else None}
    return {"sliding_window": window, "layer_types": list(layer_types)}


def _translate(
    checkpoint,
    family: Family,
    source_config,
    granularity: str | None,
    gate_bias: bool,
    gate_scale: float,
    biases: tuple[str, ...],
) -> GatedAttentionConfig:
    # A family's own gates are multiplied by their sigmoid alone.
    gates = {
        "gate_granularity": granularity or "headwise",
        "gate_bias": gate_bias,
        "gate_scale": gate_scale if family.gates is None else 1.0,
    }
    fields = {ours: getattr(source_config, theirs, None) for ours, theirs in family.config_fields.items()}
    for ours, theirs in family.config_fields.items():
        if fields[ours] is None:
            fields[ours] = family.config_defaults.get(theirs)
        if not hasattr(source_config, theirs) and theirs not in family.config_defaults:
            raise AttributeError(f"the config of a {family.model_type} model must have {theirs}")
    fields["rope_parameters"] = _rope_parameters(source_config)
    if fields.get("no_rope_layers") is not None:
        # SmolLM3 takes lists that are longer than the model.
        fields["no_rope_layers"] = list(fields["no_rope_layers"])[: source_config.num_hidden_layers]
    fields |= _window_fields(family, source_config)
    experts = _expert_fields(family, source_config)
    fixed = {
        name: value
        for name, value in family.fixed_fields.items()
        if experts or name not in ("norm_topk_prob", "router_scores_dtype")
    }
    fields |= dict.fromkeys(biases, True)
    extra = {}
    if getattr(source_config, "tokenizer_class", None):
        # AutoTokenizer reads it where tokenizer_config.json does not name a class.
        extra["tokenizer_class"] = source_config.tokenizer_class
    return GatedAttentionConfig(
        **{**gates, **fields, **experts, **fixed, **extra},
        dtype=dtype_as_loaded(checkpoint, source_config),
        architectures=[GatedAttentionForCausalLM.__name__],
        auto_map=dict(AUTO_MAP),
    )


def _rope_parameters(source_config) -> dict:
    """Of full attention, without what says how images are placed."""
    parameters = source_config.rope_parameters
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
        if parameters["rope_type"] == "default":
            parameters.pop("partial_rotary_factor", None)  # LFM3's own RoPE of this type rotates all channels
    return {name: value for name, value in parameters.items() if not name.startswith("mrope_")}


def _expert_fields(family: Family, source_config) -> dict:
    """The fields of a mixture of experts, or none if every layer is dense."""
    if not family.expert_fields:
        return {}
    dense, step = (), 1
    if family.names_dense_layers:
        dense, step = source_config.mlp_only_layers or (), source_config.decoder_sparse_step
    count = getattr(source_config, family.expert_fields["num_experts"])
    sparse = [
        bool(count) and layer not in dense and (layer + 1) % step == 0
        for layer in range(source_config.num_hidden_layers)
    ]
    if not any(sparse):
        return {}
    return {
        **{ours: getattr(source_config, theirs) for ours, theirs in family.expert_fields.items()},
        "shared_expert_gate": "shared_expert_intermediate_size" in family.expert_fields,
        "mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse],
    }


def _compare_rope(checkpoint: Checkpoint, family: Family, source_config, config: GatedAttentionConfig) -> None:
    """RoPE has no tensors that an audit of headers would compare, and many forms of config."""
    part = turned_channels(config) != config.head_dim and not family.turns_a_part and family.has_stock_class
    if part or not is_same_rope(source_config, config):
        raise ConversionError(
            f"{checkpoint.folder / 'config.json'}: its RoPE ({source_config.rope_parameters}) could not be carried over"
        )


def turned_channels(config: GatedAttentionConfig) -> int:
    """How many of a head's channels RoPE turns, the first half of them with the second."""
    return 2 * Phi3RotaryEmbedding(config).inv_freq.shape[0]


def is_same_rope(stock_config, config: GatedAttentionConfig) -> bool:
    """Whether a stock model turns queries and keys as the gated one does."""
    ours = Phi3RotaryEmbedding(config)
    by_layer_type = {}
    if "full_attention" in stock_config.rope_parameters:
        stock = Lfm3RotaryEmbedding(stock_config)
        by_layer_type["layer_type"] = kind = stock.layer_types[0]
        inv_freq, scaling = getattr(stock, f"{kind}_inv_freq"), getattr(stock, f"{kind}_attention_scaling")
    else:
        stock = Phi3RotaryEmbedding(stock_config)
        inv_freq, scaling = stock.inv_freq, stock.attention_scaling
    same = torch.equal(inv_freq, ours.inv_freq) and scaling == ours.attention_scaling
    rope_type = config.rope_parameters["rope_type"]
    if rope_type in ("longrope", "dynamic"):
        # They turn at other speeds beyond the length that they were trained on.
        beyond = config.max_position_embeddings + 1
        turn = ROPE_INIT_FUNCTIONS[rope_type]
        theirs, mine = turn(stock_config, seq_len=beyond, **by_layer_type), turn(config, seq_len=beyond)
        same = same and torch.equal(theirs[0], mine[0]) and theirs[1] == mine[1]
    return same


def dtype_as_loaded(checkpoint: Checkpoint, source_config) -> torch.dtype:
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
    if family.gates is not None:
        return set()
    added = [_BIASES[name] for name in biases if not checkpoint.config.get(family.config_fields.get(name), False)]
    projections = ("g_proj.weight", "g_proj.bias", *added)
    return {name for name in shapes if name.rpartition(".self_attn.")[2] in projections}


def new_headers(
    checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], names: set[str], pieces: tuple[Piece, ...]
) -> dict[str, TensorHeader]:
    """Headers of the new tensors; each takes the format of its layer's `q_proj`."""
    kept = {piece.target: piece.header for piece in pieces} or checkpoint.tensors
    headers = {}
    for name in names:
        layer = name.rpartition(".self_attn.")[0]
        headers[name] = TensorHeader(kept[f"{layer}.self_attn.q_proj.weight"].dtype, shapes[name])
    # Wide formats first keeps every tensor aligned to its own width.
    return dict(sorted(headers.items(), key=lambda item: (-FLOAT_FORMATS[item[1].dtype].itemsize, item[0])))


def check_layout(checkpoint: Checkpoint, family: Family, config: GatedAttentionConfig) -> None:
    """
    Check what the source's tensors have to be for their rows to be told apart.

    Raises:
        `ConversionError`: a fused `q_proj` has not the rows that the config implies; stacked experts stand beside single ones.
    """
    in_q_proj = family.gates_in_q_proj
    expected = fused_rows(config, config.gate_granularity if in_q_proj else None)
    kept = {name: header for name, header in checkpoint.tensors.items() if not is_dropped(name, family)}
    for name, header in kept.items():
        if not header.shape:
            raise ConversionError(
                f"{name} in {checkpoint.folder} is a single number, which has no place in a {family.model_type} model"
            )
        if family.model_type == "qwen3" and not in_q_proj and name.endswith(".self_attn.q_proj.weight"):
            for flag, granularity in GATE_FLAGS.items():
                if header.shape[0] == fused_rows(config, granularity):
                    raise ConversionError(
                        f"{checkpoint.folder / 'config.json'} says nothing of gates, and {_fused_facts(checkpoint)}: if they are "
                        f"those of the paper's code, set {flag} to true"
                    )
        if in_q_proj and ".self_attn.q_proj." in name and header.shape[0] != expected:
            raise ConversionError(
                f"{checkpoint.folder / 'config.json'} describes {config.gate_granularity} gates in q_proj, {expected} rows; "
                f"{name} has {header.shape[0]}: {_fused_facts(checkpoint)}. One of the two belongs to another model"
            )
        rows = rows_of_fused(family, name, config)
        if rows is not None and header.shape[0] != rows:
            raise ConversionError(
                f"{name} in {checkpoint.folder} has {header.shape[0]} rows, the config implies {rows}. Fetch it again"
            )
    layers: dict[str, set[str]] = {}
    for name, header in kept.items():
        prefix, _, rest = renamed(name, family).rpartition(".mlp.experts.")
        if not (prefix and rest):
            continue
        layers.setdefault(prefix, set()).add(renamed(name, family))
        width, hidden = config.moe_intermediate_size, config.hidden_size
        inner = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)} if config.num_experts else {}
        if rest in inner and header.shape != (config.num_experts, *inner[rest]):
            raise ConversionError(
                f"{name} in {checkpoint.folder} has shape {header.shape}, the config implies "
                f"{(config.num_experts, *inner[rest])}. Fetch it again"
            )
    problems = [
        f"{prefix}: {problem}"
        for prefix, names in sorted(layers.items())
        for stacked in EXPERT_TENSORS
        for problem in expert_problems(names, stacked, config.num_experts)
    ]
    if problems:
        raise ConversionError(
            f"the experts in {checkpoint.folder} are not the {config.num_experts} that its config.json describes: "
            f"{'; '.join(problems[:4])}. Fetch it again"
        )


def audit_names_and_shapes(
    checkpoint: Checkpoint,
    family: Family,
    config: GatedAttentionConfig,
    expected: dict[str, tuple[int, ...]],
    new: set[str],
    pieces: tuple[Piece, ...],
) -> None:
    """
    Check that the source holds the tensors that its config describes, those that are `new` apart.

    Raises:
        `ConversionError`: a tensor is missing, has another shape, or has no place in the model.
    """
    if pieces:
        found = {piece.target: piece.header.shape for piece in pieces}
    else:
        found = {name: header.shape for name, header in checkpoint.tensors.items() if not is_dropped(name, family)}
    refuse_other_tensors(
        checkpoint, config, found, expected, new, f"a {checkpoint.config['model_type']} model", "Fetch it again"
    )


def has_identity_scale(config: GatedAttentionConfig) -> bool:
    """Whether gates of zeros are exactly 1: a factor of twice the sigmoid of zero."""
    scale = (config.gate_scale, config.gate_activation, config.gate_operator)
    return scale == (IDENTITY_SCALE, "sigmoid", "multiply")


def gates_are_identity(checkpoint: Checkpoint, config: GatedAttentionConfig) -> bool:
    """Whether every gate of a gated checkpoint is exactly 1."""
    if not has_identity_scale(config):
        return False
    for shard in checkpoint.shards:
        with shard.open() as file:
            if any(file.get_tensor(name).any() for name in shard.tensors if is_gate_tensor(name)):
                return False
    return True


def refuse_other_tensors(
    checkpoint: Checkpoint,
    config: GatedAttentionConfig,
    found: dict[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    new: set[str],
    model: str,
    way_out: str,
) -> None:
    """
    Check names and shapes of tensors against what a config implies; those that are `new` are not looked for.

    Raises:
        `ConversionError`: a tensor is missing, has another shape, or has no place in the `model`.
    """
    missing = expected.keys() - found.keys() - new
    if config.tie_word_embeddings:
        missing -= set(GatedAttentionForCausalLM._tied_weights_keys)
    problems = [f"{name} is missing" for name in sorted(missing)]
    if "lm_head.weight" in missing:
        problems.append(
            "the config says that the head is not tied (tie_word_embeddings false), so it cannot be taken from the embedding"
        )
    problems += [f"{name} has no place in {model}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {found[name]}, the config implies {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ConversionError(
            f"the tensors in {checkpoint.folder} are not those that its config.json describes: {shown}. {way_out}"
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
