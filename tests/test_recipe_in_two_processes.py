"""A recipe with two processes on a CPU trains as one process does, and goes on exactly where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from test_recipe import content, gated, losses, run, tensors_of  # noqa: F401
from typer.testing import CliRunner

from gated_attention.cli import app


def in_two_processes(content, tmp_path, environment=None, **changes) -> subprocess.CompletedProcess:  # noqa: F811
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(content | changes))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", "127.0.0.1:0", "-m", "gated_attention.cli", "train", str(recipe)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})


def run_twice(content, tmp_path, **changes) -> dict:  # noqa: F811
    """With two processes; what was written down."""
    process = in_two_processes(content, tmp_path, ddp_backend="gloo", **changes)
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stdout.count("parameters  tensors") == 1  # one process speaks
    return json.loads((Path(changes["output_dir"]) / "training_results.json").read_text())


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "streaming"])
def test_two_processes(content, tmp_path, streaming):  # noqa: F811
    options = {
        "streaming": streaming,
        "shuffle": False,
        "train_sampling_strategy": "sequential",
        "parameter_groups": [{"pattern": "gates", "learning_rate": 5.0, "from_step": 2}],
        "save_strategy": "steps",
        "save_steps": 3,
    }
    alone = run(content, **options, gradient_accumulation_steps=2)
    straight = run_twice(content, tmp_path, **options, output_dir=str(tmp_path / "straight"))
    found = [value for _, value in straight["curves"]["loss"]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses(alone)), rtol=1e-4, atol=1e-4)
    assert straight["final"]["eval_loss"] == pytest.approx(alone.final["eval_loss"], rel=1e-4)
    ours, theirs = tensors_of(alone.output_dir), tensors_of(tmp_path / "straight")
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-4)

    # Stopped at step 3, and gone on with.
    stopped = str(tmp_path / "stopped")
    halfway = tmp_path / "straight" / "checkpoint-3"
    Path(stopped).mkdir()
    halfway.rename(Path(stopped) / "checkpoint-3")
    again = run_twice(content, tmp_path, **options, output_dir=stopped, resume_from_checkpoint="auto")
    assert [value for _, value in again["curves"]["loss"]] == found
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors_of(stopped).items())


@pytest.mark.parametrize("by", ["recipe", "accelerate"])
def test_fsdp_that_would_silently_be_something_else_is_refused(content, tmp_path, by):  # noqa: F811
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2}} if by == "recipe" else {}
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if by == "accelerate" else {}
    process = in_two_processes(content, tmp_path, settings, ddp_backend="gloo", **fsdp)
    assert process.returncode != 0
    assert "FSDP was asked for" in process.stderr, process.stderr[-4000:]


def test_command_leaves_no_process_group(content, tmp_path):  # noqa: F811
    """Its threads would still run while the interpreter ends, which now and then aborts a process that has finished."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(content))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        result = CliRunner().invoke(app, ["train", str(recipe)])
        assert result.exit_code == 0, result.output
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
