"""
Loads a model and runs it. The same lines run here and, as a script, in a process that cannot import this package: so they import
nothing of it.
"""

import json
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file


class RefusePackage:
    """Hides this package from a process, wherever it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gated_attention":
            raise ImportError("gated_attention is hidden from this process")


def load_model(folder: str, auto_class: str, adapter: str | None, dtype: str, trust_remote_code: bool):
    """
    A model, ready to run.

    Args:
        folder: Where its weights are; of an adapter, those of its base model.
        auto_class: Name of the Auto class.
        adapter: Folder of a PEFT adapter to put on top.
        dtype: `"auto"` or a name of torch's.
        trust_remote_code: Whether code from the folder may run.
    """
    model = getattr(transformers, auto_class).from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


def run_model(model, input_ids: torch.Tensor, outputs: list[str], new_tokens: int) -> dict[str, torch.Tensor]:
    """
    What a model computes.

    Args:
        model: The model.
        input_ids: Token ids of shape `(batch, sequence)`.
        outputs: Names of the outputs to return.
        new_tokens: How many tokens to generate greedily; models that do not generate give none.

    Returns:
        The outputs by name, and `"generated"`: token ids of shape `(batch, sequence + new_tokens)`.
    """
    with torch.no_grad():
        found = model(input_ids=input_ids, use_cache=False)
        results = {name: getattr(found, name).contiguous() for name in outputs}
        if new_tokens and hasattr(model, "generate") and getattr(model, "can_generate", lambda: True)():
            # No end token: the same number of tokens from each model.
            results["generated"] = model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                pad_token_id=0,
            )
    return results


def main() -> None:
    """Run what the JSON file says that is the only argument."""
    sys.meta_path.insert(0, RefusePackage())
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    torch.set_num_threads(request["threads"])
    model = load_model(
        request["folder"], request["auto_class"], request["adapter"], request["dtype"], request["trust_remote_code"]
    )
    input_ids = load_file(request["inputs"])["input_ids"]
    save_file(run_model(model, input_ids, request["outputs"], request["new_tokens"]), request["results"])
    if request["tokenizer"] is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            request["tokenizer"], trust_remote_code=request["trust_remote_code"]
        )
        if not tokenizer("attention").input_ids:
            raise ValueError("the tokenizer makes no tokens of a word")


if __name__ == "__main__":
    main()
