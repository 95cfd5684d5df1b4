"""The gated attention layer head by head, token by token and channel by channel: slow, and plain to check against the paper."""

import math

import torch


ACTIVATIONS = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "ns_sigmoid": lambda x: 0.5 + 0.5 / (1 + math.exp(-x)),
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "identity": lambda x: x,
}

PROJECTIONS = {
    "sdpa_output": "g_proj",
    "value": "g_proj_v",
    "key": "g_proj_k",
    "query": "g_proj_q",
    "dense_output": "g_proj_o",
}


def naive_gated_attention(attention, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """
    What the layer adds to the residual stream for one sequence, causal.

    Args:
        attention: The layer.
        hidden (`torch.Tensor` of shape `(length, hidden_size)`): Its input, in float64.
        cos, sin (`torch.Tensor` of shape `(length, rotated channels)`): Of RoPE.
    """
    config, dim = attention.config, attention.head_dim
    length, heads = hidden.shape[0], config.num_attention_heads
    group = heads // config.num_key_value_heads
    window = attention.sliding_window or length

    def project(linear, token, head):
        rows = slice(head * dim, (head + 1) * dim)
        result = linear.weight[rows] @ hidden[token]
        return result + linear.bias[rows] if linear.bias is not None else result

    def normalise(norm, vector):
        weight = 1 + norm.weight if config.zero_centered_norm else norm.weight
        return vector / math.sqrt(float(vector @ vector) / dim + config.rms_norm_eps) * weight

    def rotate(vector, token):
        if not config.no_rope_layers[attention.layer_idx]:
            return vector
        rotated = cos.shape[-1]
        half = rotated // 2
        result = vector.clone()
        for channel in range(rotated):
            partner = -vector[channel + half] if channel < half else vector[channel - half]
            result[channel] = vector[channel] * cos[token, channel] + partner * sin[token, channel]
        return result

    def log_forget(token, head):
        logit = float(attention.f_proj.weight[head] @ hidden[token] + attention.f_proj.bias[head])
        return math.log(1 / (1 + math.exp(-logit)))

    def decay(head, earlier, token):
        if not config.forget_gate:
            return 0.0
        return sum(log_forget(between, head) for between in range(earlier + 1, token + 1))

    def score(position, token, head, channel, channels):
        projection = getattr(attention, PROJECTIONS[position])
        row = head if config.gate_granularity == "headwise" else head * channels + channel
        logit = 0.0 if projection.bias is None else float(projection.bias[row])
        if config.gate_input == "hidden_states":
            reads = config.gate_input_size or config.hidden_size
            logit += float(projection.weight[row] @ hidden[token, :reads])
        return config.gate_scale * ACTIVATIONS[config.gate_activation](logit)

    def gate(position, token, head, vector, number_of_heads):
        gated_here = config.gate_layers is None or attention.layer_idx in config.gate_layers
        if position not in config.gate_positions or not gated_here:
            return vector
        result = vector.clone()
        for channel in range(len(vector)):
            if config.gate_sharing == "head_shared":
                every = [score(position, token, one, channel, len(vector)) for one in range(number_of_heads)]
                value = sum(every) / len(every)
            else:
                value = score(position, token, head, channel, len(vector))
            result[channel] = (
                vector[channel] * value if config.gate_operator == "multiply" else vector[channel] + value
            )
        return result

    def query_of(token, head):
        vector = project(attention.q_proj, token, head)
        vector = normalise(attention.q_norm, vector) if config.qk_norm else vector
        return rotate(gate("query", token, head, vector, heads), token)

    def key_of(token, head):
        vector = project(attention.k_proj, token, head)
        vector = normalise(attention.k_norm, vector) if config.qk_norm else vector
        return rotate(gate("key", token, head, vector, heads // group), token)

    def value_of(token, head):
        return gate("value", token, head, project(attention.v_proj, token, head), heads // group)

    keys = {(token, head): key_of(token, head) for token in range(length) for head in range(heads // group)}
    values = {(token, head): value_of(token, head) for token in range(length) for head in range(heads // group)}
    scaling = 1 / math.sqrt(dim) if config.attention_multiplier is None else config.attention_multiplier
    outputs = []
    for token in range(length):
        head_outputs = []
        for head in range(heads):
            query = query_of(token, head)
            seen = range(max(0, token - window + 1), token + 1)
            logits = [
                float(query @ keys[earlier, head // group]) * scaling + decay(head, earlier, token) for earlier in seen
            ]
            weights = [math.exp(logit - max(logits)) for logit in logits]
            mixed = torch.zeros(dim, dtype=hidden.dtype)
            for earlier, weight in zip(seen, weights, strict=True):
                mixed += weight / sum(weights) * values[earlier, head // group]
            if config.sdpa_output_nonlinearity == "rms_norm":
                mixed = normalise(attention.sdpa_norm, mixed)
            elif config.sdpa_output_nonlinearity == "silu":
                mixed = torch.tensor([ACTIVATIONS["silu"](float(x)) for x in mixed], dtype=hidden.dtype)
            head_outputs.append(gate("sdpa_output", token, head, mixed, heads))
        output = attention.o_proj.weight @ torch.cat(head_outputs)
        output = output + attention.o_proj.bias if attention.o_proj.bias is not None else output
        outputs.append(gate("dense_output", token, 0, output, 1))
    return torch.stack(outputs)
