"""
Finds the attention sinks of a layer in its data.

A sink is a kind of token that many queries look at although it says little: rare, much attended, and always in about the same
state. The first token is one in most models, whatever token it is; in some layers others join it (delimiters, or a frequent
word), which share its state there.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from .opened_attention import OpenedAttention


# Cosine to the leader's state (less the mean over tokens) from which a token counts as being in the same state. The cosines are bimodal where a sink is.
SAME_STATE = 0.8
# What a group of tokens must take of the layer's attention: a share, and so many times what it would get if queries looked
# at all tokens alike, unless it takes a large share (in a short window no token can get ten times as much). What it may make
# up of a window: a share of the tokens, or a token or two of a short one.
LEAST_ATTENTION = 0.05
LEAST_EXCESS = 10.0
LARGE_ATTENTION = 0.3
LARGEST_SHARE_OF_TOKENS = 0.03
LEAST_TOKENS = 1.5
MOST_GROUPS = 8
MOST_LEADERS = 16
SHOWN_TOKENS = 5


@dataclass
class SinkGroup:
    """
    Tokens in the same state that draw attention.

    Attributes:
        attention: Share of the layer's attention that they get, averaged over heads.
        tokens_per_window: How many there are in a window.
        first_token_share: Share of the windows whose first token is one of them.
        further_tokens: Ids of those that are not the first of their window, the most frequent first, with their number.
    """

    attention: float
    tokens_per_window: float
    first_token_share: float
    further_tokens: list[tuple[int, int]]


@dataclass
class Sinks:
    """
    The sinks of a layer.

    Attributes:
        mask: `(windows, length)`: the tokens that are sinks.
        weights: `(windows, length)`: how much of the attention on sinks each gets; sums to 1.
        groups: What they are, the greatest first; empty if the layer has no sink.
    """

    mask: torch.Tensor
    weights: torch.Tensor
    groups: list[SinkGroup]

    @property
    def attention(self) -> float:
        """Share of the layer's attention that goes to sinks."""
        return sum(group.attention for group in self.groups)


def find_sinks(opened: OpenedAttention, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> Sinks:
    """
    Find the sinks of a layer.

    Args:
        opened (`OpenedAttention`): The layer's attention.
        hidden_states (`torch.Tensor` of shape `(windows, length, hidden_size)`): What the layer gets.
        input_ids (`torch.LongTensor` of shape `(windows, length)`): The tokens, for the report.

    Returns:
        [`Sinks`]
    """
    windows, length, _ = hidden_states.shape
    received, states = [], []
    for window in hidden_states:
        projections = opened.project(window.to(opened.cos.device))
        total = torch.zeros(length, device=opened.cos.device)
        for _, probabilities in opened.probabilities(projections.query, projections.key):
            # What a token gives to itself makes it no sink; the first has nobody else to look at.
            total += probabilities.sum((0, 1)) - probabilities.diagonal(dim1=1, dim2=2).sum(0)
        received.append(total / (len(projections.query) * (length - 1)))
        states.append(projections.inputs.cpu())
    received, states = torch.stack(received).cpu(), torch.stack(states)
    # What all tokens have in common would make them alike.
    states = normalize(states - states.mean((0, 1)), dim=-1)
    # What each token would receive from the queries after it if they looked at all alike.
    alike = (1 / torch.arange(2, length + 1)).flip(0).cumsum(0).flip(0) / (length - 1)
    alike = torch.nn.functional.pad(alike, (0, 1)).expand(windows, -1)
    most_tokens = max(LARGEST_SHARE_OF_TOKENS * length, LEAST_TOKENS)

    mask = torch.zeros(windows, length, dtype=torch.bool)
    left, groups = received.clone(), []
    for _ in range(MOST_LEADERS):
        if len(groups) == MOST_GROUPS or left.max() <= 0:
            break
        members = states @ states.flatten(0, 1)[left.argmax()] > SAME_STATE
        # Once more around the members' mean, so that little depends on which of them led.
        weighted = (left * members)[..., None]
        members = (states @ normalize((weighted * states).sum((0, 1)), dim=-1) > SAME_STATE) & ~mask
        attention = received[members].sum().item() / windows
        by_chance = alike[members].sum().item() / windows
        present = members.any(1).float().mean().item()  # first tokens of one kind are in some windows only
        least = max(LEAST_ATTENTION, min(LEAST_EXCESS * by_chance, LARGE_ATTENTION * present))
        if attention >= least and members.sum() <= most_tokens * windows:
            further = Counter(input_ids[:, 1:][members[:, 1:]].tolist())
            groups.append(
                SinkGroup(
                    attention,
                    members.float().sum(1).mean().item(),
                    members[:, 0].float().mean().item(),
                    further.most_common(SHOWN_TOKENS),
                )
            )
            mask |= members
        left = left.masked_fill(members, 0)
        left.view(-1)[left.argmax()] = 0  # no leader twice
    weights = received * mask
    return Sinks(mask, weights / weights.sum().clamp(min=1e-12), groups)
