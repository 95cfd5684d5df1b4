"""Whatever can be uploaded loads at a stranger's: every head, experts, stock models, native exports, adapters."""

import json
from importlib.metadata import entry_points

import pytest
import torch
import transformers
from conftest import (
    TINY_SHAPE,
    edit_config,
    logits_of,
    randomise,
    run_as_stranger,
    tiny_gated,
    tiny_input_ids,
    tiny_llama,
    tiny_tokenizer,
)
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import gated_attention
from gated_attention import GatedAttentionConfig, GatedAttentionForCausalLM, UploadError
from gated_attention.hub.base_model import check_base_on_hub
from gated_attention.hub.push import push_folder
from gated_attention.hub.source import read_model_folder


REPO = "someone/tiny"
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def save(folder, model):
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    return folder


def headed(head: str, **fields):
    config = GatedAttentionConfig(**TINY_SHAPE, **fields, pad_token_id=0)
    return randomise(getattr(gated_attention, f"GatedAttention{head}")(config), seed=3)


def hybrid() -> Qwen3NextForCausalLM:
    """Layers of linear attention and of gated attention, experts included."""
    config = Qwen3NextConfig(
        **{**TINY_SHAPE, "num_hidden_layers": 4, "head_dim": 16},
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=16,
        **MOE,
        pad_token_id=None,
    )
    model = randomise(Qwen3NextForCausalLM(config))
    assert set(model.config.layer_types) == {"linear_attention", "full_attention"}
    return model


def stranger_outputs(hub, tmp_path, auto_class: str, output: str, trust: bool, base: str | None = None):
    """What a stranger computes with the pushed model."""
    save_file({"input_ids": tiny_input_ids()}, tmp_path / "inputs.safetensors")
    run_as_stranger(
        hub,
        f"""
from transformers import {auto_class}
model = {auto_class}.from_pretrained({base or REPO!r}, trust_remote_code={trust})
if {base is not None}:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, {REPO!r})
input_ids = load_file({str(tmp_path / "inputs.safetensors")!r})["input_ids"]
with torch.no_grad():
    found = model.eval()(input_ids=input_ids, use_cache=False).{output}
save_file({{"found": found.contiguous()}}, {str(tmp_path / "found.safetensors")!r})
""",
    )
    return load_file(tmp_path / "found.safetensors")["found"]


KINDS = {
    "causal_lm": (lambda: tiny_gated(), "AutoModelForCausalLM", "text-generation", "logits"),
    "experts": (lambda: tiny_gated(**MOE), "AutoModelForCausalLM", "text-generation", "logits"),
    "sequence_classification": (
        lambda: headed("ForSequenceClassification", num_labels=5),
        "AutoModelForSequenceClassification",
        "text-classification",
        "logits",
    ),
    "token_classification": (
        lambda: headed("ForTokenClassification", num_labels=5),
        "AutoModelForTokenClassification",
        "token-classification",
        "logits",
    ),
    "question_answering": (
        lambda: headed("ForQuestionAnswering"),
        "AutoModelForQuestionAnswering",
        "question-answering",
        "end_logits",
    ),
    "no_head": (lambda: headed("Model"), "AutoModel", "feature-extraction", "last_hidden_state"),
    "stock_hybrid": (hybrid, "AutoModelForCausalLM", "text-generation", "logits"),
}


@pytest.mark.parametrize(("make", "auto_class", "task", "output"), KINDS.values(), ids=KINDS)
def test_pushed_model_computes_the_same_at_a_strangers(hub_here, tmp_path, make, auto_class, task, output):
    """By the check, which loads what is sent in a process without the package; two kinds are fetched by their id as well."""
    model = make()
    folder = save(tmp_path / "model", model)
    result = push_folder(folder, REPO)
    assert result.check.error == 0
    assert result.check.generated == result.check.agreed == (16 if task == "text-generation" else 0)
    files = hub_here.files(REPO)
    needs_code = model.config.model_type == "gated_attention"
    card = ModelCard(files["README.md"].decode())
    assert card.data.pipeline_tag == task
    assert f'{auto_class}.from_pretrained("{REPO}"' in card.text
    assert ("trust_remote_code" in card.text) == needs_code == any(name.endswith(".py") for name in files)
    if make in (hybrid, KINDS["sequence_classification"][0]):
        with torch.no_grad():
            expected = getattr(model(input_ids=tiny_input_ids(), use_cache=False), output)
        assert torch.equal(stranger_outputs(hub_here, tmp_path, auto_class, output, needs_code), expected)


# A target, and the gates that it has.
NATIVE = {"qwen3_5": ("elementwise", False), "qwen3_next": ("headwise", True), "lfm3": ("headwise", False)}


@pytest.mark.parametrize(("native", "granularity", "widen"), [(to, *how) for to, how in NATIVE.items()], ids=NATIVE)
def test_native_push_needs_no_code(hub_here, tmp_path, native, granularity, widen):
    folder = save(tmp_path / "model", tiny_gated(qk_norm=True, gate_granularity=granularity, gate_scale=2.0))
    if native == "lfm3":
        push_folder(folder, REPO)
    result = push_folder(folder, REPO, native=native, widen_gates=widen)
    assert result.check.error < 1e-5
    assert result.check.agreed == result.check.generated == 16
    files = hub_here.files(REPO)
    # Of the gated model that was there, its code and its config's reference to it are gone.
    assert not [name for name in files if name.endswith(".py")]
    assert "auto_map" not in json.loads(files["config.json"])
    assert "gated_attention_export.json" in files
    assert "gated-attention export" in files["README.md"].decode()


@pytest.mark.parametrize(
    ("make", "native", "words"),
    [
        (lambda: tiny_gated(), "qwen3_5", "QK-norm|qk_norm"),
        (lambda: tiny_llama(), "lfm3", "only a gated model is exported"),
    ],
    ids=["does_not_fit", "not_gated"],
)
def test_native_push_that_cannot_be_sends_nothing(hub_here, tmp_path, make, native, words):
    folder = save(tmp_path / "model", make())
    with pytest.raises(UploadError, match=words):
        push_folder(folder, REPO, native=native)
    assert hub_here.requests == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "nobody_knows"}, "gated-attention convert"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "auto_map"),
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
    ],
    ids=["unknown_type", "code_of_its_own", "other_architecture"],
)
def test_stock_folder_that_nobody_could_load_is_refused(hub_here, tmp_path, fields, words):
    folder = save(tmp_path / "model", tiny_llama())
    edit_config(folder, **fields)
    with pytest.raises(UploadError, match=words):
        push_folder(folder, REPO)
    assert hub_here.requests == []


@pytest.fixture
def adapter(tmp_path):
    """LoRA and gates that were trained on a base model in a local folder."""
    base = save(tmp_path / "base", tiny_gated(gate_scale=2.0))
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["g_proj"]),
    )
    randomise(model, seed=11).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def pushed_base(adapter, hub_here):
    """The base model on the Hub, without the check, which other tests show."""
    HfApi().create_repo("someone/base")
    HfApi().upload_folder(repo_id="someone/base", folder_path=adapter.parent / "base")
    return "someone/base"


def test_adapter_is_pushed_beside_its_base_model(adapter, pushed_base, hub_here, tmp_path):
    push_folder(adapter, REPO, base_model=pushed_base)
    files = hub_here.files(REPO)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} == files.keys() - {".gitattributes"}
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == pushed_base and config["auto_mapping"] is None
    card = ModelCard(files["README.md"].decode())
    assert (card.data.library_name, card.data.base_model, card.data.license) == ("peft", pushed_base, "mit")
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), adapter).eval()
    found = stranger_outputs(hub_here, tmp_path, "AutoModelForCausalLM", "logits", trust=True, base=pushed_base)
    assert torch.equal(found, logits_of(model))
    run_as_stranger(
        hub_here,
        f"from peft import AutoPeftModelForCausalLM\nAutoPeftModelForCausalLM.from_pretrained({REPO!r}, trust_remote_code=True)",
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"modeling_gated_attention.py": None}, "does not hold the model's code"),
        ({"model.safetensors": b"other weights"}, "has other weights"),
    ],
    ids=["no_code", "other_weights"],
)
def test_adapter_whose_base_model_is_another_one_is_refused(adapter, pushed_base, hub_here, edit, words):
    hub_here.edit(pushed_base, edit)
    model = read_model_folder(adapter)
    with pytest.raises(UploadError, match=words):
        check_base_on_hub(model, pushed_base)


def test_adapter_of_a_stock_model_needs_no_code(hub_here, tmp_path):
    base = save(tmp_path / "base", tiny_llama())
    HfApi().create_repo("someone/base")
    HfApi().upload_folder(repo_id="someone/base", folder_path=base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, task_type="CAUSAL_LM"))
    randomise(model, seed=11).save_pretrained(tmp_path / "adapter")
    push_folder(tmp_path / "adapter", REPO, base_model="someone/base")
    text = ModelCard(hub_here.files(REPO)["README.md"].decode()).text
    assert 'AutoModelForCausalLM.from_pretrained("someone/base")' in text and "trust_remote_code" not in text


@pytest.mark.parametrize("trained", [False, True], ids=["plain", "with_a_card"])
def test_adapter_of_a_local_folder_asks_for_the_base_model(adapter, hub_here, trained):
    if trained:
        # What a recipe leaves names what the base was converted from, which is not the base.
        (adapter / "README.md").write_text("---\nlicense: mit\nbase_model: its/source\n---\n# Adapter\n")
        (adapter / "training_results.json").write_text("{}")
    with pytest.raises(UploadError, match="--base-model"):
        push_folder(adapter, REPO)
    assert hub_here.requests == []


@pytest.fixture
def repository(hub_here, tmp_path, request):
    """The files of a pushed model, as a server finds them."""
    push_folder(save(tmp_path / "model", request.param()), REPO)
    folder = tmp_path / "served"
    for name, content in hub_here.files(REPO).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


SERVED = {"dense": lambda: tiny_gated(qk_norm=True), "experts": lambda: tiny_gated(**MOE)}


@pytest.mark.parametrize("repository", SERVED.values(), ids=SERVED, indirect=True)
def test_servers_transformers_backends_can_take_the_repository(repository, without_package):
    """What vLLM and SGLang ask of custom code: read from the pushed files alone, in a process without the package."""
    auto_map = json.loads((repository / "config.json").read_text())["auto_map"]
    # vLLM makes the config's class known before the model's, in the order of the map.
    assert list(auto_map)[:2] == ["AutoConfig", "AutoModel"]
    without_package(f"""
import json
import torch.nn as nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
config = AutoConfig.from_pretrained({str(repository)!r}, trust_remote_code=True)
with torch.device("meta"):
    model = AutoModel.from_config(config, trust_remote_code=True, attn_implementation="sdpa")
assert type(model).is_backend_compatible() and model._supports_attention_backend
assert type(config).model_type == "gated_attention"

# Each linear layer of a decoder layer is split by columns or rows, or kept whole.
import re
plan = config.base_model_tp_plan
patterns = {{name.replace(".", "[.]").replace("*", "[0-9]+"): style for name, style in plan.items()}}
styles = {{}}
for name, module in model.named_modules():
    if isinstance(module, nn.Linear):
        found = [style for pattern, style in patterns.items() if re.fullmatch(pattern, name)]
        styles[name.rpartition(".")[2]] = found[0] if found else None
assert styles["q_proj"] == styles["k_proj"] == styles["v_proj"] == styles["g_proj"] == "colwise", styles
assert styles["o_proj"] == "rowwise", styles
assert set(styles.values()) <= {{"colwise", "rowwise", None}}, styles
assert set(config.base_model_pp_plan) == {{"embed_tokens", "layers", "norm"}}

# Attention is looked up by name, and gets what the server hands down.
seen = []
def attention(module, query, key, value, attention_mask, scaling=None, handed_down=None, **kwargs):
    seen.append((handed_down, scaling, module.is_causal))
    return torch.zeros(query.shape[0], query.shape[2], query.shape[1], query.shape[3]), None
ALL_ATTENTION_FUNCTIONS["of_a_server"] = attention
model = AutoModel.from_config(config, trust_remote_code=True)
model.set_attn_implementation("of_a_server")
model(inputs_embeds=torch.zeros(1, 4, config.hidden_size), position_ids=torch.arange(4)[None], use_cache=False, handed_down=7)
assert len(seen) == config.num_hidden_layers and all(got == 7 and causal for got, _, causal in seen)
""")


def test_vllm_finds_the_model_where_the_package_is_installed(monkeypatch):
    """vLLM loads every entry point of this group and calls it, in each of its processes."""
    (plugin,) = entry_points(group="vllm.general_plugins", name="gated_attention")
    register = plugin.load()
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    with pytest.raises(ValueError, match="gated_attention"):
        AutoConfig.for_model("gated_attention")
    register()
    register()
    config = AutoConfig.for_model("gated_attention", **TINY_SHAPE)
    assert type(AutoModelForCausalLM.from_config(config)) is GatedAttentionForCausalLM
    # Looked up by name where `auto_map` is not followed.
    assert transformers.AutoModelForCausalLM._model_mapping[type(config)] is GatedAttentionForCausalLM
