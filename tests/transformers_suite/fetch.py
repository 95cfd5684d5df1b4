"""
Fetch transformers' own tests: they are in the source distribution of each release, not in its wheel.

    python tests/transformers_suite/fetch.py FOLDER

makes the package `transformers_tests` in FOLDER, for the installed release. What those files import and the source
distribution lacks gets a stand-in: generation and export tests (empty), the common config fields, and a launcher of
processes for the tensor parallel tests.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers


WANTED = (
    "test_configuration_common.py",
    "test_modeling_common.py",
    "test_tensor_parallel_mixin.py",
    "test_training_mixin.py",
)

STAND_INS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["BertModel"],
    "id2label": {0: "label"},
    "label2id": {"label": "0"},
    "problem_type": "regression",
}
""",
    "distributed_testing_utils.py": '''"""Runs a function in several processes that make up a gloo group."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank, world_size, port, function, args):
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def run_distributed(world_size):
    def launcher(function):
        def run(*args):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            mp.spawn(_rank, args=(world_size, port, function, args), nprocs=world_size)

        return run

    return launcher
''',
}


def fetch(folder: Path) -> Path:
    """Make `folder`/transformers_tests, unless it is there already, and return its path."""
    package = folder / "transformers_tests"
    version = package / "VERSION"
    if version.is_file() and version.read_text() == transformers.__version__:
        return package
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Without build isolation no build backend is fetched for what is only unpacked.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", ":all:", "--dest", scratch, f"transformers=={transformers.__version__}"]
        subprocess.run(command, check=True)
        archive = next(Path(scratch).glob("transformers-*.tar.gz"))
        made = Path(scratch) / package.name
        with tarfile.open(archive) as tar:
            found = {Path(member.name).name: member for member in tar if Path(member.name).parent.name == "tests"}
            missing = sorted(set(WANTED) - found.keys())
            if missing:
                raise RuntimeError(f"{archive.name} has no {', '.join(missing)} in its tests folder")
            for name, content in STAND_INS.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_text(content, encoding="utf-8")
            for name in WANTED:
                (made / name).write_bytes(tar.extractfile(found[name]).read())
        (made / version.name).write_text(transformers.__version__)
        # Complete before it has its name, so that a run that is stopped leaves no half of it.
        if package.exists():
            shutil.rmtree(package)
        made.rename(package)
    return package


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(fetch(Path(sys.argv[1])))
