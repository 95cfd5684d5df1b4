"""The command line says what it does, does what the function does, and fails with a message instead of a traceback."""

import subprocess
import sys

import pytest
from conftest import COMMAND, logits_of, tree_hashes

from gated_attention import GatedAttentionForCausalLM, __version__, convert_checkpoint
from gated_attention.conversion import FAMILIES


def run(*arguments, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run([COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


def test_help_and_version_need_no_heavy_import():
    script = """
import sys
sys.argv = ["gated-attention", "--help"]
from gated_attention.cli import main
try:
    main()
except SystemExit as stop:
    assert stop.code == 0
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "convert" in process.stdout
    assert run("--version").stdout.strip() == f"gated-attention {__version__}"


def test_convert_does_what_the_function_does(source, target):
    process = run("convert", source, target, "--granularity", "elementwise", "--gate-bias", "--link", "hard")
    assert process.returncode == 0, process.stderr
    assert "bit for bit" in process.stdout
    convert_checkpoint(source, target.parent / "other", granularity="elementwise", gate_bias=True)
    assert tree_hashes(target) == tree_hashes(target.parent / "other")
    assert logits_of(GatedAttentionForCausalLM.from_pretrained(target)).isfinite().all()


def test_relative_paths(source, target):
    process = run("convert", source.name, f"new/{target.name}", "--link", "hard", cwd=source.parent)
    assert process.returncode == 0, process.stderr
    assert logits_of(GatedAttentionForCausalLM.from_pretrained(source.parent / "new" / target.name)).isfinite().all()


def test_dry_run_prints_the_plan_and_writes_nothing(source, target):
    before = tree_hashes(source.parent)
    process = run("convert", source, target, "--dry-run")
    assert process.returncode == 0, process.stderr
    for part in (
        "30 tensors",
        "3 layers x 4 heads",
        "model-00001-of-00002.safetensors",
        "writes",
        "free at the target",
    ):
        assert part in process.stdout
    assert tree_hashes(source.parent) == before
    assert not target.exists()


def test_headers_only(source, target):
    process = run("convert", source, target, "--verify", "headers")
    assert process.returncode == 0, process.stderr
    assert "logits not compared" in process.stdout


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["", "dry_run"])
def test_refusals_are_one_line_and_exit_1(tmp_path, target, dry_run):
    process = run("convert", tmp_path / "nowhere", target, *dry_run)
    assert process.returncode == 1
    assert process.stderr.startswith("gated-attention: ") and "is not a folder" in process.stderr
    assert "Traceback" not in process.stderr
    assert not target.exists()


def test_families_lists_each_with_what_is_exact():
    process = run("families")
    assert process.returncode == 0, process.stderr
    for family in FAMILIES.values():
        assert family.model_type in process.stdout
    assert "bit for bit" in process.stdout and "to rounding" in process.stdout and "not olmo2" in process.stdout
    assert max(map(len, process.stdout.splitlines())) <= 100
