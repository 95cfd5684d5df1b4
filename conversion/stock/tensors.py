"""What each tensor of a stock checkpoint is made of: rows of the gated model's, moved, repeated, and multiplied by powers of two."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ...configuration import GatedAttentionConfig
from ...modeling_gated.expert_tensors import EXPERT_TENSORS, single_experts
from ..checkpoint import FLOAT_FORMATS, Checkpoint, TensorHeader, is_ignored_on_load
from ..errors import ConversionError
from ..families import Family
from ..gated_config import turned_channels
from .norms import narrower, split_query_and_key_weights, split_weight
from .stock_config import EMPTY_EXPERT_WIDTH


# What is held of a tensor at a time: little enough for the caches.
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Part:
    """
    Some rows of an output tensor.

    Attributes:
        source: The tensor that they are taken from; `None` for zeros.
        rows: Which: (first, behind the last).
        repeat: How often each stands there.
    """

    source: str | None
    rows: tuple[int, int]
    repeat: int = 1

    @property
    def count(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.repeat


@dataclass(frozen=True)
class OutputTensor:
    """
    A tensor of the stock checkpoint.

    Attributes:
        name: Its name.
        header: Its format and shape.
        parts: Its rows; of a stack of experts those of one after the other.
        home: A tensor of the gated checkpoint; the output goes into the counterpart of its file. `None`: into a file of its own.
        factor: Factor on all its numbers.
        columns: Factor on each column, of shape `(columns,)`, float64.
        value: The tensor itself, where it is small and was computed.
        how: What was done, in words; empty if nothing was.
    """

    name: str
    header: TensorHeader
    parts: tuple[Part, ...]
    home: str | None
    factor: float = 1.0
    columns: torch.Tensor | None = None
    value: torch.Tensor | None = None
    how: str = ""

    def is_untouched(self, headers: dict[str, TensorHeader]) -> bool:
        """Whether it is one tensor of the gated checkpoint with these headers, but for its name."""
        if self.value is not None or self.factor != 1.0 or self.columns is not None or len(self.parts) != 1:
            return False
        return self.header == headers.get(self.parts[0].source)

    def blocks(self, files: dict[str, object], changes: "Changes") -> Iterator[torch.Tensor]:
        """
        Its numbers, some rows at a time.

        Args:
            files: The open file of each tensor of the gated checkpoint.
            changes: Takes down what was rounded.
        """
        if self.value is not None:
            yield self.value
            return
        width = self.header.numel // max(1, sum(part.count for part in self.parts))
        dtype = FLOAT_FORMATS[self.header.dtype]
        for part in self.parts:
            step = max(1, _CHUNK_BYTES // max(1, width * dtype.itemsize * part.repeat))
            for first in range(*part.rows, step):
                last = min(first + step, part.rows[1])
                if part.source is None:
                    yield torch.zeros((last - first) * part.repeat, width, dtype=dtype)
                    continue
                rows = files[part.source].get_slice(part.source)[first:last]
                rows = self._computed(rows.reshape(last - first, -1), width, dtype, changes)
                yield rows if part.repeat == 1 else rows.repeat_interleave(part.repeat, dim=0)

    def _computed(self, rows: torch.Tensor, width: int, dtype: torch.dtype, changes: "Changes") -> torch.Tensor:
        missing = width - rows.shape[1]
        rows = rows.to(dtype)
        if self.factor != 1.0 or self.columns is not None:
            factors = torch.full((rows.shape[1],), self.factor, dtype=torch.float64)
            if self.columns is not None:
                factors *= self.columns[: rows.shape[1]]
            rows = _multiplied(self.name, rows, factors, changes)
        return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def _multiplied(name: str, rows: torch.Tensor, factors: torch.Tensor, changes: "Changes") -> torch.Tensor:
    """Rows times factors (float64), in the rows' own format; what is rounded is taken down."""
    # By powers of two a product is exact, but for what leaves the range of normal numbers; then the way back is exact too.
    own, inverse = factors.to(rows.dtype), (1 / factors).to(rows.dtype)
    result = rows * own
    if (torch.frexp(factors).mantissa.abs() == 0.5).all() and torch.equal(result * inverse, rows):
        return result
    exact = rows.double() * factors
    result = exact.to(rows.dtype)
    changes.take_down(name, result, exact)
    return result


class Changes:
    """Which tensors have numbers that were rounded, and by how much: the largest difference over the largest number."""

    def __init__(self):
        self.rounded: dict[str, float] = {}

    def take_down(self, name: str, stored: torch.Tensor, exact: torch.Tensor) -> None:
        """
        Compare what is stored with what it stands for (float64).

        Raises:
            `ConversionError`: a number does not fit into the format at all.
        """
        difference = (stored.double() - exact).abs()
        if not difference.any():
            return
        if (exact.isfinite() & ~stored.isfinite()).any():
            raise ConversionError(f"{name} has numbers that do not fit into {stored.dtype} once they are multiplied")
        relative = (difference / exact.abs()).nan_to_num(0, 0, 0).max().item()
        self.rounded[name] = max(self.rounded.get(name, 0.0), relative)


def stock_name(name: str, family: Family) -> str:
    """A tensor's name in a stock checkpoint."""
    for theirs, ours in family.renames:
        name = name.replace(ours, theirs)
    return name


class TensorPlanner:
    """
    Plans the tensors of a stock checkpoint.

    Args:
        checkpoint, config: The gated model.
        family: Of the stock class.
        read: Gives a tensor of the checkpoint.
        switches: Values of the stock config's bias switches.
        loaded: Format that the stock model loads in.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: GatedAttentionConfig,
        family: Family,
        read: Callable[[str], torch.Tensor],
        switches: dict[str, bool],
        loaded: torch.dtype,
    ):
        self.headers = {name: header for name, header in checkpoint.tensors.items() if not is_ignored_on_load(name)}
        self.config, self.family, self.read = config, family, read
        self.switches, self.loaded = switches, loaded
        self.to_zero_centered = bool(family.fixed_fields.get("zero_centered_norm")) and not config.zero_centered_norm
        self.from_zero_centered = config.zero_centered_norm and not family.fixed_fields.get("zero_centered_norm")
        self.outputs: list[OutputTensor] = []
        self.changes = Changes()
        self.unties_head = False

    def plan(self) -> list[OutputTensor]:
        """Every tensor of the stock checkpoint."""
        done = set()
        final = self._norm("model.norm.weight")
        for layer in range(self.config.num_hidden_layers):
            done |= self._plan_attention(layer)
            done |= self._plan_mlp(layer)
        done.add("model.norm.weight")
        if final is not None:
            head = "lm_head.weight" if "lm_head.weight" in self.headers else "model.embed_tokens.weight"
            home = head if head == "lm_head.weight" else None
            self._whole(head, columns=final, how=_COLUMNS, name="lm_head.weight", home=home)
            self.unties_head = self.config.tie_word_embeddings
            done.add("lm_head.weight")
        for name in self.headers.keys() - done:
            self._whole(name)
        order = {name: index for index, name in enumerate(self.headers)}
        return sorted(self.outputs, key=lambda output: order.get(output.home, len(order)))

    # ---- norms

    def _norm(self, name: str) -> torch.Tensor | None:
        """Plan a norm; what goes into the columns of the matrices behind it."""
        columns, how = None, ""
        weight = self.read(name)
        if self.to_zero_centered:
            weight, columns = split_weight(weight, self.loaded)
            how = "weight - 1" if columns is None else "weight - 1, after powers of two went into the matrices behind"
        elif self.from_zero_centered:
            weight = self._plain(name, weight)
            how = "1 + weight"
        if how:
            self._value(name, weight, how)
        else:
            self._whole(name)
        return columns

    def _plain(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        exact = 1 + weight.double()
        stored = exact.to(weight.dtype)
        self.changes.take_down(stock_name(name, self.family), stored, exact)
        return stored

    def _query_and_key_norms(self, prefix: str) -> None:
        names = [f"{prefix}q_norm.weight", f"{prefix}k_norm.weight"]
        if names[0] not in self.headers:
            return
        weights = [self.read(name) for name in names]
        if not self.to_zero_centered:
            for name in names:
                self._norm(name)
            return
        stored = split_query_and_key_weights(*weights, turned_channels(self.config), self.loaded)
        held = [1 + one.to(narrower(one.dtype, self.loaded)).double() for one in stored]
        products = [held[0] * held[1], weights[0].double() * weights[1].double()]
        moved = any(
            not torch.equal(1 + kept.double(), weight.double()) for kept, weight in zip(stored, weights, strict=True)
        )
        how = (
            "weight - 1, after powers of two went from one of q_norm and k_norm to the other"
            if moved
            else "weight - 1"
        )
        for name, kept in zip(names, stored, strict=True):
            self.changes.take_down(stock_name(name, self.family), *products)
            self._value(name, kept, how)

    # ---- attention

    def _plan_attention(self, layer: int) -> set[str]:
        prefix = f"model.layers.{layer}.self_attn."
        norm = f"model.layers.{layer}.input_layernorm.weight"
        columns = self._norm(norm)
        self._query_and_key_norms(prefix)
        gated = self.config.layer_has_gate(layer)
        drops_gates = self.family.gates is None
        if "self_attn.qkv_proj" in self.family.fused:
            self._stack(f"{prefix}qkv_proj.weight", [f"{prefix}{name}_proj.weight" for name in "qkv"])
        else:
            if self.family.gates_in_q_proj:
                self._fused_query(prefix, columns, gated)
            else:
                self._projection(f"{prefix}q_proj", columns)
            for name in ("k_proj", "v_proj"):
                self._projection(f"{prefix}{name}", columns)
        if self.family.gates == "g_proj":
            self._gate(prefix, columns, gated)
        # Without a gate of its own a layer gets one of zeros, which is 1/2.
        factor = 1.0 if drops_gates else float(self.config.gate_scale) if gated else 2.0
        self._projection(f"{prefix}o_proj", None, factor)
        return {name for name in self.headers if name.startswith(prefix)} | {norm}

    def _bias_switch(self, projection: str) -> str | None:
        field = {"q_proj": "qk_bias", "k_proj": "qk_bias", "v_proj": "v_bias", "o_proj": "o_bias"}[projection]
        return self.family.config_fields.get(field)

    def _projection(self, name: str, columns: torch.Tensor | None, factor: float = 1.0) -> None:
        how = _COLUMNS if columns is not None else f"x {factor:g}, gate_scale" if factor != 1.0 else ""
        self._whole(f"{name}.weight", columns=columns, factor=factor, how=how)
        projection = name.rpartition(".")[2]
        if f"{name}.bias" in self.headers:
            self._whole(f"{name}.bias")
        elif self.switches.get(self._bias_switch(projection)):
            weight = self.headers[f"{name}.weight"]
            self._zeros(f"{name}.bias", weight.dtype, (weight.shape[0],), f"{name}.weight")

    def _gate_part(self, prefix: str, rows: tuple[int, int], gated: bool, end: str) -> Part:
        """The gate's rows for one head of `head_dim` channels; each of a headwise gate as often as there are channels."""
        name = f"{prefix}g_proj.{end}"
        headwise = self.config.gate_granularity == "headwise"
        count = rows[1] - rows[0]
        repeat = self.config.head_dim if headwise else 1
        if not gated or name not in self.headers:
            return Part(None, (0, count * repeat))
        return Part(name, rows, repeat)

    def _fused_query(self, prefix: str, columns: torch.Tensor | None, gated: bool) -> None:
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        width = dim if self.config.gate_granularity == "elementwise" else 1
        for end in ("weight", "bias"):
            name = f"{prefix}q_proj.{end}"
            if end == "bias" and not self.switches.get(self._bias_switch("q_proj")):
                continue
            query = self.headers.get(name)
            gate = self.headers.get(f"{prefix}g_proj.{end}") if gated else None
            parts = []
            for head in range(heads):
                parts.append(Part(name if query else None, (head * dim, (head + 1) * dim)))
                parts.append(self._gate_part(prefix, (head * width, (head + 1) * width), gated, end))
            formats = [header.dtype for header in (query, gate) if header] or [
                self.headers[f"{prefix}q_proj.weight"].dtype
            ]
            inner = (self.config.hidden_size,) if end == "weight" else ()
            self.outputs.append(
                OutputTensor(
                    name=stock_name(name, self.family),
                    header=TensorHeader(_widest(formats), (2 * heads * dim, *inner)),
                    parts=tuple(_joined(parts)),
                    home=f"{prefix}q_proj.weight",
                    columns=columns if end == "weight" else None,
                    how=_fused_how(gated, width == 1, columns if end == "weight" else None),
                )
            )

    def _gate(self, prefix: str, columns: torch.Tensor | None, gated: bool) -> None:
        """A gate apart, one row a head, without a bias."""
        name, heads = f"{prefix}g_proj.weight", self.config.num_attention_heads
        header = self.headers.get(name)
        hidden = self.config.hidden_size
        if not gated or header is None:
            self._zeros(name, self.headers[f"{prefix}q_proj.weight"].dtype, (heads, hidden), f"{prefix}q_proj.weight")
            return
        padded = replace(header, shape=(heads, hidden))
        how = _COLUMNS if columns is not None else "columns of zeros, for channels that the gate does not read"
        if columns is None and padded == header:
            how = ""
        self._whole(name, columns=columns, how=how, header=padded)

    # ---- MLP

    def _plan_mlp(self, layer: int) -> set[str]:
        prefix = f"model.layers.{layer}.mlp."
        norm = f"model.layers.{layer}.post_attention_layernorm.weight"
        columns = self._norm(norm)
        done = {name for name in self.headers if name.startswith(prefix)} | {norm}
        if self.config.mlp_layer_types[layer] == "dense":
            self._plan_dense(prefix, columns)
            return done
        self._reader(f"{prefix}gate.weight", columns)
        self._plan_experts(prefix, columns)
        if self.config.shared_expert_intermediate_size is not None:
            self._plan_dense(f"{prefix}shared_expert.", columns, gate=f"{prefix}shared_expert_gate.weight")
        elif "shared_expert_intermediate_size" in self.family.expert_fields:
            self._empty_expert(prefix)
        return done

    def _plan_dense(self, prefix: str, columns: torch.Tensor | None, gate: str | None = None) -> None:
        if "mlp.gate_up_proj" in self.family.fused:
            self._stack(f"{prefix}gate_up_proj.weight", [f"{prefix}{name}_proj.weight" for name in ("gate", "up")])
        else:
            for name in ("gate_proj", "up_proj"):
                self._reader(f"{prefix}{name}.weight", columns)
                self._kept_bias(f"{prefix}{name}")
        ungated = gate is not None and gate not in self.headers
        # A gate of zeros is 1/2.
        self._whole(f"{prefix}down_proj.weight", factor=2.0 if ungated else 1.0, how="x 2" if ungated else "")
        self._kept_bias(f"{prefix}down_proj")
        if ungated:
            header = self.headers[f"{prefix}gate_proj.weight"]
            self._zeros(gate, header.dtype, (1, self.config.hidden_size), f"{prefix}gate_proj.weight")
        elif gate is not None:
            self._reader(gate, columns)

    def _kept_bias(self, name: str) -> None:
        if f"{name}.bias" in self.headers and "mlp_bias" in self.family.config_fields:
            self._whole(f"{name}.bias")

    def _plan_experts(self, prefix: str, columns: torch.Tensor | None) -> None:
        for stacked in EXPERT_TENSORS:
            rows = self.config.moe_intermediate_size * len(EXPERT_TENSORS[stacked])
            height = rows if stacked == "gate_up_proj" else self.config.hidden_size
            singles = [
                f"{prefix}experts.{single}"
                for single, _, _ in single_experts(stacked, self.config.num_experts, height)
            ]
            of_norm = columns if stacked == "gate_up_proj" else None
            if not self.family.stacks_experts:
                for name in singles:
                    self._reader(name, of_norm)
                continue
            first = self.headers[singles[0]]
            self.outputs.append(
                OutputTensor(
                    name=stock_name(f"{prefix}experts.{stacked}", self.family),
                    header=TensorHeader(
                        _widest([self.headers[name].dtype for name in singles]),
                        (self.config.num_experts, height, first.shape[1]),
                    ),
                    parts=tuple(Part(name, (0, self.headers[name].shape[0])) for name in singles),
                    home=singles[0],
                    columns=of_norm,
                    how="experts stacked" + (f", {_COLUMNS}" if of_norm is not None else ""),
                )
            )

    def _empty_expert(self, prefix: str) -> None:
        home = f"{prefix}gate.weight"
        dtype, hidden = self.headers[home].dtype, self.config.hidden_size
        shapes = {
            "shared_expert.gate_proj": (EMPTY_EXPERT_WIDTH, hidden),
            "shared_expert.up_proj": (EMPTY_EXPERT_WIDTH, hidden),
            "shared_expert.down_proj": (hidden, EMPTY_EXPERT_WIDTH),
            "shared_expert_gate": (1, hidden),
        }
        for name, shape in shapes.items():
            self._zeros(f"{prefix}{name}.weight", dtype, shape, home)

    # ---- outputs

    def _reader(self, name: str, columns: torch.Tensor | None) -> None:
        """A matrix that reads what a norm gives."""
        self._whole(name, columns=columns, how="" if columns is None else _COLUMNS)

    def _stack(self, name: str, parts: list[str]) -> None:
        """Projections, one behind the other."""
        headers = [self.headers[part] for part in parts]
        self.outputs.append(
            OutputTensor(
                name=stock_name(name, self.family),
                header=TensorHeader(
                    _widest([header.dtype for header in headers]),
                    (sum(header.shape[0] for header in headers), *headers[0].shape[1:]),
                ),
                parts=tuple(Part(part, (0, header.shape[0])) for part, header in zip(parts, headers, strict=True)),
                home=parts[0],
                how=f"rows of {', '.join(part.split('.')[-2] for part in parts)}",
            )
        )

    def _whole(
        self,
        source: str,
        columns: torch.Tensor | None = None,
        factor: float = 1.0,
        how: str = "",
        name: str | None = None,
        home: str | None = "",
        header: TensorHeader | None = None,
    ) -> None:
        own = self.headers[source]
        self.outputs.append(
            OutputTensor(
                name=stock_name(name or source, self.family),
                header=header or own,
                parts=(Part(source, (0, own.shape[0])),),
                home=source if home == "" else home,
                factor=factor,
                columns=columns,
                how=how,
            )
        )

    def _zeros(self, name: str, dtype: str, shape: tuple[int, ...], home: str) -> None:
        header = TensorHeader(dtype, shape)
        part = Part(None, (0, shape[0]))
        self.outputs.append(OutputTensor(stock_name(name, self.family), header, (part,), home, how="zeros"))

    def _value(self, name: str, value: torch.Tensor, how: str) -> None:
        self.outputs.append(
            OutputTensor(stock_name(name, self.family), self.headers[name], (), name, value=value, how=how)
        )


_COLUMNS = "columns x powers of two, from the norm before"


def _fused_how(gated: bool, headwise: bool, columns: torch.Tensor | None) -> str:
    rows = "rows of q_proj and zeros" if not gated else "rows of q_proj and g_proj"
    if gated and headwise:
        rows += ", a gate's for each channel of its head"
    return rows + (f"; {_COLUMNS}" if columns is not None else "")


def _widest(formats: list[str]) -> str:
    """A format that holds the numbers of all of them."""
    widest = FLOAT_FORMATS[formats[0]]
    for name in formats[1:]:
        widest = torch.promote_types(widest, FLOAT_FORMATS[name])
    return next(name for name, dtype in FLOAT_FORMATS.items() if dtype == widest)


def _joined(parts: list[Part]) -> Iterator[Part]:
    """Parts that go on where the one before ends become one."""
    waiting = None
    for part in parts:
        if (
            waiting is not None
            and (waiting.source, waiting.repeat) == (part.source, part.repeat)
            and waiting.rows[1] == part.rows[0]
        ):
            waiting = replace(waiting, rows=(waiting.rows[0], part.rows[1]))
            continue
        if waiting is not None:
            yield waiting
        waiting = part
    if waiting is not None:
        yield waiting
