"""One import name, however the checkout is installed and whatever its folder is called; nothing else in site-packages."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest


CHECKOUT = Path(__file__).parents[1]

USE = """
import pathlib, sys
import gated_attention
from gated_attention.configuration import GatedAttentionConfig
from gated_attention.conversion import convert_checkpoint
from gated_attention.modeling_gated import GatedAttentionForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("gated_attention", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=8)
assert type(config) is GatedAttentionConfig is gated_attention.GatedAttentionConfig
assert type(AutoModelForCausalLM.from_config(config)) is GatedAttentionForCausalLM
print(pathlib.Path(gated_attention.__file__).resolve())
"""


def run(*command, cwd) -> subprocess.CompletedProcess:
    process = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the checkout under another name, since installing leaves files in it."""
    copy = tmp_path_factory.mktemp("work") / "another-name"
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(CHECKOUT, copy, ignore=left_out)
    return copy


@pytest.fixture
def new_venv(tmp_path):
    """A new environment that borrows the dependencies, not this package, from the one the tests run in."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)  # pip and setuptools are borrowed too
    python = venv / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).stdout.strip()
    )
    # As an entry of sys.path, so that the .pth files in it, such as that of an editable install, are not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    before = {path.name for path in site.iterdir()}
    return python, site, lambda: {path.name for path in site.iterdir()} - before


def assert_works_from_anywhere(python, checkout, tmp_path, location):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # A folder of one's own with a name that the package uses inside must not get in the way.
    (elsewhere / "configuration").mkdir()
    (elsewhere / "configuration" / "__init__.py").write_text("")
    for cwd in (elsewhere, checkout, checkout.parent):
        assert run(python, "-c", USE, cwd=cwd).stdout.strip().startswith(str(location.resolve())), cwd
    assert "convert" in run(python.with_name("gated-attention"), "--help", cwd=elsewhere).stdout


@pytest.mark.slow
def test_wheel(checkout, new_venv, tmp_path):
    python, site, added = new_venv
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        checkout,
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        cwd=tmp_path,
    )
    wheel = next(tmp_path.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"gated_attention", next(name for name in tops if name.endswith(".dist-info"))}
    assert not [name for name in names if "/tests/" in name or "/benchmarks/" in name]
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)
    assert {name for name in added() if not name.endswith(".dist-info")} == {"gated_attention"}
    assert_works_from_anywhere(python, checkout, tmp_path, site / "gated_attention")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compat", "strict"])
def test_editable(checkout, new_venv, tmp_path, mode):
    python, _, added = new_venv
    settings = ["--config-settings", "editable_mode=strict"] if mode == "strict" else []
    run(
        python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed",
        *settings, "-e", checkout,
        cwd=tmp_path,
    )  # fmt: skip
    tops = {name for name in added() if not name.endswith(".dist-info")}
    assert all(name.startswith("__editable__") or name == "__pycache__" for name in tops)
    assert_works_from_anywhere(python, checkout, tmp_path, checkout)


def imported_from_the_root(statement: str) -> str:
    process = subprocess.run([sys.executable, "-c", statement], cwd=CHECKOUT, capture_output=True, text=True)
    assert process.returncode != 0
    return process.stderr


def test_folders_of_the_checkout_are_not_importable_by_their_own_names():
    assert "from gated_attention import GatedAttentionConfig" in imported_from_the_root("import configuration")
    assert "ImportError" in imported_from_the_root("import modeling_gated")
    assert "ImportError" in imported_from_the_root("import conversion")


def test_checkout_imported_under_its_folders_name_says_what_to_do(tmp_path):
    (tmp_path / "any_name").symlink_to(CHECKOUT)
    process = subprocess.run([sys.executable, "-c", "import any_name"], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode != 0
    assert "import gated_attention" in process.stderr
    assert "make test" in process.stderr


def test_one_config_class_in_this_process():
    classes = {
        id(value)
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items())
        if name == "GatedAttentionConfig" and isinstance(value, type)
    }
    assert len(classes) == 1
