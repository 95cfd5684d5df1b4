"""The page of benchmarks says what their results say, and two runs are compared by their intervals."""

import json
import shutil
import subprocess
import sys
from pathlib import Path


REPOSITORY = Path(__file__).parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"


def write_page(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "page.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_page_has_the_ratios_of_the_results(tmp_path):
    process = write_page("--page", tmp_path / "page.md")
    assert process.returncode == 0, process.stderr
    page = (tmp_path / "page.md").read_text()
    for title in ("Conversion", "Attention, eager", "Attention, compiled", "Diagnostics", "Export", "Training step"):
        assert f"## {title}" in page
    low, median, high = sorted(json.loads((RESULTS / "training.json").read_text())["ratio"])
    assert f"| {median:.3f} | {low:.3f} to {high:.3f} |" in page


def test_runs_agree_while_their_intervals_meet(tmp_path):
    other = shutil.copytree(RESULTS, tmp_path / "other")
    page = tmp_path / "page.md"
    process = write_page("--page", page, "--agree", other)
    assert process.returncode == 0 and "the two runs agree" in process.stdout
    content = json.loads((other / "training.json").read_text())
    content["ratio"] = [ratio + 1 for ratio in content["ratio"]]
    (other / "training.json").write_text(json.dumps(content))
    process = write_page("--page", page, "--agree", other)
    assert process.returncode == 1 and process.stdout.count("training, ") == 1


def test_benchmarks_that_were_not_run_are_left_out(tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    shutil.copyfile(RESULTS / "diagnostics.json", only / "diagnostics.json")
    assert write_page("--page", tmp_path / "page.md", "--results", only).returncode == 0
    page = (tmp_path / "page.md").read_text()
    assert page.count("## ") == 1 and "## Diagnostics" in page
