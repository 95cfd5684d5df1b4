"""
What the paper reports, to stand beside what a study finds: arXiv 2505.06708.

Perplexities of its tables are those of `GATE_VARIANTS`.
"""

from ..configuration import GATE_VARIANTS


_MIXTURE = "a mixture of experts with 15 billion parameters, 2 billion of them active, after 400 billion tokens of 4,096-token rows"

# By table: what was trained, and by variant what it gave.
FIGURES = {
    "variants": {
        "source": f"Tables 1 to 3: {_MIXTURE}",
        "rows": {
            name: {"perplexity": variant.perplexity}
            for name, variant in GATE_VARIANTS.items()
            if variant.perplexity is not None
        },
    },
    "sinks": {
        "source": f"Table 4: {_MIXTURE}",
        "rows": {
            "baseline": {"m_act": 1053, "f_attn": 0.467, "perplexity": 6.026},
            "g1_elementwise": {"gate_mean": 0.116, "m_act": 94, "f_attn": 0.048, "perplexity": 5.761},
            "g1_headwise": {"gate_mean": 0.172, "m_act": 98, "f_attn": 0.073, "perplexity": 5.792},
            "g1_head_shared": {"gate_mean": 0.271, "m_act": 286, "f_attn": 0.301, "perplexity": 5.801},
            "g2_elementwise": {"gate_mean": 0.221, "m_act": 125, "f_attn": 0.297, "perplexity": 5.820},
            "g1_input_independent": {"gate_mean": 0.335, "m_act": 471, "f_attn": 0.364, "perplexity": 5.917},
            "g1_ns_sigmoid": {"gate_mean": 0.653, "m_act": 892, "f_attn": 0.451, "perplexity": 5.900},
        },
    },
    "stability": {
        "source": "dense models of 48 layers: at a learning rate of 8e-3 the baseline's loss spikes (perplexity 9.195 after 400 billion tokens) or diverges "
        "(1,000 billion), the gated one's does not (7.325 and 7.078)",
        "rows": {},
    },
}

PAPER_LENGTHS = (
    "The paper's figures (Table 5: RULER after training at 32,768 tokens; to 131,072 with YaRN and no training; 4k / 8k / 16k / 32k / 64k / 128k): baseline 82.9 / "
    "71.5 / 61.2 / 37.9 / 37.5 / 31.7, gated 88.1 / 80.0 / 76.7 / 72.9 / 66.6 / 58.8; before YaRN at 32k 79.50 and 79.77."
)
