"""
Trains a small model of Qwen3's architecture (QK-norm, grouped queries) that has an attention sink.

No small Qwen3 checkpoint can be had from the package index, and the sink transfer has to be tried on one: the norm after `k_proj`
leaves the direction of a key to an edit, and nothing of its length. By itself a model this small forms no sink within minutes (tried:
1,200 steps on text, and the task of arXiv 2410.13835), so for the first two thirds of the steps heads that give the first token less
than a share of their attention pay for it; the last third is plain training. Default text: Python's own help pages.

    python benchmarks/train_qwen3.py OUTPUT [--text FILE ...] [--steps 900] [--bos/--no-bos]
    gated-attention transfer OUTPUT TARGET --length 128 --tokens 32768
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import trange
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from gated_attention import inspect_model
from gated_attention.diagnostics.texts import default_text


VOCABULARY = 2048
LENGTH = 128


def train_tokenizer(text: str, bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    # Qwen's own tokenizers have no BOS token.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>" if bos else None
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--bos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--every", type=int, default=150)
    parser.add_argument(
        "--share", type=float, default=0.5, help="attention on the first token that heads pay for less of"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in arguments.text) or default_text()[0]
    tokenizer = train_tokenizer(text, arguments.bos)
    token_ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    held_out, token_ids = token_ids[-32 * LENGTH :], token_ids[: -32 * LENGTH]
    first = [tokenizer.bos_token_id] if arguments.bos else []

    def windows(ids: torch.Tensor, starts) -> torch.Tensor:
        body = LENGTH - len(first)
        return torch.stack([torch.cat([torch.tensor(first, dtype=torch.long), ids[at : at + body]]) for at in starts])

    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            attn_implementation="eager",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, arguments.learning_rate, total_steps=arguments.steps, pct_start=0.05
    )
    held = [{"input_ids": row[None]} for row in windows(held_out, range(0, 16 * LENGTH, LENGTH))]
    generator = torch.Generator().manual_seed(arguments.seed)
    history, started = [], time.perf_counter()
    bar = trange(arguments.steps, desc="Training", unit="step", disable=None)
    for step in bar:
        starts = torch.randint(len(token_ids) - LENGTH, (arguments.batch,), generator=generator)
        batch = windows(token_ids, starts.tolist())
        urged = step < arguments.steps * 2 // 3
        output = model(batch, labels=batch, use_cache=False, output_attentions=urged)
        loss = output.loss
        if urged:
            # (layers, batch, heads, queries): the first layer is left out, which cannot know that a token is the first
            shares = torch.stack([attention[:, :, 1:, 0] for attention in output.attentions[1:]])
            loss = loss + 2 * (arguments.share - shares.mean((1, 3))).relu().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
            found = inspect_model(model, held, ranks=False)
            per_layer = [sum(layer.f_attn) / len(layer.f_attn) for layer in found.layers]
            figures = {"step": step + 1, "loss": output.loss.item(), **found.summary(), "f_attn_by_layer": per_layer}
            history.append(figures)
            tqdm_line = f"step {step + 1}: loss {output.loss.item():.3f}, held out {found.perplexity:.1f}, F-Attn "
            bar.write(tqdm_line + " ".join(f"{share:.3f}" for share in per_layer))
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    summary = {"seconds": time.perf_counter() - started, "history": history}
    (arguments.output / "training.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
