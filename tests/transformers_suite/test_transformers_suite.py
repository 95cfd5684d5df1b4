"""
transformers' common tests of models, configs, training and tensor parallelism, run against the classes of this package.

The testers below play the part of `CausalLMModelTester`, which the source distribution of transformers lacks.
"""

import unittest

import torch
from transformers.models.auto import modeling_auto
from transformers_tests import test_tensor_parallel_mixin
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers_tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from transformers_tests.test_training_mixin import TrainingTesterMixin

from gated_attention import (
    GatedAttentionConfig,
    GatedAttentionForCausalLM,
    GatedAttentionForQuestionAnswering,
    GatedAttentionForSequenceClassification,
    GatedAttentionForTokenClassification,
    GatedAttentionModel,
)


# The common tests look a class up in these tables of names to know which labels it takes; registration with the Auto
# classes does not fill them.
modeling_auto.MODEL_MAPPING_NAMES["gated_attention"] = "GatedAttentionModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gated_attention"] = "GatedAttentionForCausalLM"
modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES["gated_attention"] = "GatedAttentionForQuestionAnswering"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["gated_attention"] = (
    "GatedAttentionForSequenceClassification"
)
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["gated_attention"] = "GatedAttentionForTokenClassification"
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES.add("gated_attention")


TESTS_OF_EXPERTS = (
    "test_eager_matches_batched_and_grouped_inference",
    "test_output_router_logits_from_config",
    "test_reverse_loading_mapping",
)


class GatedAttentionModelTester:
    """Makes the tiny config and its inputs; `fields` are what a variant of the suite adds."""

    base_model_class = GatedAttentionModel
    causal_lm_class = GatedAttentionForCausalLM
    fields = {}

    def __init__(self, parent):
        self.parent = parent
        self.batch_size = 13
        self.seq_length = 7
        self.is_training = True
        self.vocab_size = 99
        self.hidden_size = 32
        self.intermediate_size = 32
        self.num_hidden_layers = 2
        self.num_attention_heads = 2
        self.num_key_value_heads = 2
        self.head_dim = 16
        self.num_labels = 3

    def get_config(self) -> GatedAttentionConfig:
        return GatedAttentionConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        attention_mask = torch.tril(torch.ones_like(input_ids))
        return self.get_config(), {"input_ids": input_ids, "attention_mask": attention_mask}


class Suite(ModelTesterMixin, TrainingTesterMixin, TensorParallelTesterMixin, GenerationTesterMixin):
    all_model_classes = (
        GatedAttentionModel,
        GatedAttentionForCausalLM,
        GatedAttentionForSequenceClassification,
        GatedAttentionForTokenClassification,
        GatedAttentionForQuestionAnswering,
    )
    make_tester = GatedAttentionModelTester
    model_tester = None  # instead of the mixins' abstract property

    def setUp(self):
        self.model_tester = type(self).make_tester(self)
        self.config_tester = ConfigTester(self, config_class=GatedAttentionConfig, hidden_size=64)
        # They ask the class, which is one for dense and sparse models, whether there are experts.
        if self._testMethodName.startswith(TESTS_OF_EXPERTS) and not self.model_tester.get_config().num_experts:
            self.skipTest("Dense: there are no experts")

    def test_config(self):
        self.config_tester.run_common_tests()


class ElementwiseTest(Suite, unittest.TestCase):
    """The default: the gate of Qwen3-Next."""


class EverythingTester(GatedAttentionModelTester):
    fields = {
        "gate_positions": ["sdpa_output", "value", "key", "query", "dense_output"],
        "gate_bias": True,
        "gate_scale": 2.0,
        "gate_activation": "softplus",
        "sdpa_output_nonlinearity": "rms_norm",
        "qk_norm": True,
        "qk_bias": True,
        "v_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 4,
        "no_rope_layers": [0, 1],
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    }


class EverythingTest(Suite, unittest.TestCase):
    """Gates on all five positions, and each feature of the decoder that can stand beside the others."""

    make_tester = EverythingTester


class SparseTester(GatedAttentionModelTester):
    """As the tester of transformers does for mixtures of experts: all experts are used, or some would get no gradient."""

    fields = {
        "num_experts": 8,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 24,
        "shared_expert_gate": True,
        "router_z_loss_coef": 0.001,
        "gate_granularity": "headwise",
        "qk_norm": True,
    }


class SparseTest(Suite, unittest.TestCase):
    """A mixture of experts with a shared expert."""

    make_tester = SparseTester


class MixedTester(SparseTester):
    fields = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse"],
        "router_logits_dtype": "float32",
        "router_scores_dtype": "float32",
    }


class MixedTest(Suite, unittest.TestCase):
    """A dense layer before a sparse one, two of eight experts a token, the router in float32."""

    make_tester = MixedTester
