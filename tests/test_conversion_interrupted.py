"""Case 16: a conversion that is cut off leaves nothing that looks finished, and the next run works."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY_SHAPE, logits_of, randomise, save_source, tiny_llama, tree_hashes
from transformers import Phi3Config, Phi3ForCausalLM

from gated_attention import GatedAttentionForCausalLM, convert_checkpoint
from gated_attention.conversion import ConversionError


def leftovers(target):
    return sorted(path.name for path in target.parent.iterdir() if target.name in path.name)


def assert_next_run_works(source, target):
    convert_checkpoint(source, target)
    assert leftovers(target) == [target.name]
    assert logits_of(GatedAttentionForCausalLM.from_pretrained(target)).isfinite().all()


@pytest.mark.parametrize("overwrite", [False, True], ids=["new_folder", "overwriting"])
def test_read_error_on_the_second_shard(sharded_source, target, monkeypatch, overwrite):
    if overwrite:
        save_source(target, tiny_llama(seed=4))
    before = tree_hashes(sharded_source.parent)
    copied = []
    real_copyfile = shutil.copyfile

    def failing_copyfile(source, destination, **kwargs):
        copied.append(source)
        if len(copied) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        return real_copyfile(source, destination, **kwargs)

    monkeypatch.setattr(shutil, "copyfile", failing_copyfile)
    with pytest.raises(OSError, match="Input/output error"):
        convert_checkpoint(sharded_source, target, overwrite=overwrite)
    assert len(copied) == 2
    partial = target.parent / f".{target.name}.partial"
    assert [path.name for path in partial.glob("*.safetensors")] != []  # what was finished stays for the next run
    monkeypatch.undo()
    shutil.rmtree(partial)
    assert tree_hashes(sharded_source.parent) == before
    if overwrite:
        shutil.rmtree(target)
    assert_next_run_works(sharded_source, target)


def test_disk_full(source, target):
    """A limit on the size of files makes the kernel refuse the write, as a full disk does."""
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
from gated_attention import convert_checkpoint
convert_checkpoint({str(source)!r}, {str(target)!r})
"""
    before = tree_hashes(source)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode != 0
    assert "File too large" in process.stderr
    assert leftovers(target) == []
    assert tree_hashes(source) == before
    assert_next_run_works(source, target)


def test_too_little_room_is_seen_before_anything_is_copied(source, target, monkeypatch):
    monkeypatch.setattr("gated_attention.conversion.write.free_bytes", lambda path: 1000)
    with pytest.raises(ConversionError, match=r"needs .* kB, 1\.0 kB are free"):
        convert_checkpoint(source, target)
    assert leftovers(target) == []


@pytest.mark.parametrize("stage", ["write_conversion", "audit_headers", "compare_models"])
def test_killed(source, target, stage):
    """SIGKILL of a real process, right after each step."""
    script = f"""
import os, signal
from gated_attention.conversion import convert
done = convert.{stage}
def then_die(*args):
    done(*args)
    os.kill(os.getpid(), signal.SIGKILL)
convert.{stage} = then_die
convert.convert_checkpoint({str(source)!r}, {str(target)!r})
"""
    before = tree_hashes(source)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert process.returncode == -signal.SIGKILL
    assert leftovers(target) == [f".{target.name}.lock", f".{target.name}.partial"]
    assert tree_hashes(source) == before
    assert_next_run_works(source, target)


def test_killed_between_moving_the_old_folder_away_and_the_new_one_in(source, target):
    convert_checkpoint(source, target, granularity="elementwise")
    old = tree_hashes(target)
    target.rename(target.parent / f".{target.name}.replaced")
    with pytest.raises(ConversionError, match="not empty"):
        # The next run first gives back what was there.
        convert_checkpoint(source, target)
    assert tree_hashes(target) == old
    assert leftovers(target) == [target.name]


def test_old_folder_stays_if_the_new_one_cannot_be_moved_in(source, target, monkeypatch):
    convert_checkpoint(source, target, granularity="elementwise")
    old = tree_hashes(target)
    real_rename = Path.rename

    def failing_rename(self, destination):
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "cannot be moved")
        return real_rename(self, destination)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="cannot be moved"):
        convert_checkpoint(source, target, overwrite=True)
    assert tree_hashes(target) == old
    assert leftovers(target) == [target.name]


def test_old_folder_is_removed_if_a_run_was_killed_after_its_last_rename(source, target):
    convert_checkpoint(source, target, granularity="elementwise")
    save_source(target.parent / f".{target.name}.replaced", tiny_llama(seed=5))
    convert_checkpoint(source, target, overwrite=True)
    assert leftovers(target) == [target.name]


def interrupted(script: str) -> str:
    """Ctrl-C on a script once it prints that it is ready; what it then says."""
    # A background job's children ignore it otherwise.
    script = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + script
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.strip().endswith("KeyboardInterrupt")
    return errors


def test_interrupted_run_goes_on_where_it_was(source, target):
    script = f"""
import time
from gated_attention.conversion import convert
convert.audit_headers = lambda *args: (print("ready", flush=True), time.sleep(60))
convert.convert_checkpoint({str(source)!r}, {str(target)!r})
"""
    errors = interrupted(script)
    assert "1 finished files; the same command goes on from there" in errors
    assert leftovers(target) == [f".{target.name}.partial"]
    result = convert_checkpoint(source, target)
    assert result.reused == ("model-00001-of-00002.safetensors",)
    assert leftovers(target) == [target.name]
    assert not (target / ".conversion-journal").exists()


def test_interrupt_before_anything_is_finished_leaves_nothing(source, target):
    script = f"""
import time
from gated_attention.conversion import write
write.shutil.copyfile = lambda *args: (print("ready", flush=True), time.sleep(60))
from gated_attention import convert_checkpoint
convert_checkpoint({str(source)!r}, {str(target)!r})
"""
    interrupted(script)
    assert leftovers(target) == []


@pytest.fixture(params=["additive", "rewritten"])
def half_done(request, tmp_path, target):
    """A source in several files, and what a run that was killed in the middle of them left."""
    model = tiny_llama() if request.param == "additive" else phi3()
    source = save_source(tmp_path / "source", model, sharded=True)
    script = f"""
import os, signal
from gated_attention.conversion import convert, journal
real, done = journal.Journal.add, []
def add(self, path):
    real(self, path)
    done.append(path)
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.add = add
convert.convert_checkpoint({str(source)!r}, {str(target)!r}, verify="headers")
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert process.returncode == -signal.SIGKILL
    return source


def phi3():
    shape = {**TINY_SHAPE, "hidden_size": 40, "pad_token_id": 0}
    del shape["head_dim"]
    return randomise(Phi3ForCausalLM(Phi3Config(**shape)))


def first_shards(target):
    partial = target.parent / f".{target.name}.partial"
    return sorted(path for path in partial.glob("*.safetensors"))[:2]


def test_killed_run_goes_on_where_it_was(half_done, target):
    inodes = {path.name: path.stat().st_ino for path in first_shards(target)}
    result = convert_checkpoint(half_done, target)
    assert result.logits_equal
    assert set(result.reused) == set(inodes)
    assert {name: (target / name).stat().st_ino for name in inodes} == inodes
    assert leftovers(target) == [target.name]


def test_finished_file_that_was_damaged_is_made_again(half_done, target):
    damaged = first_shards(target)[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    result = convert_checkpoint(half_done, target)
    assert result.logits_equal
    assert damaged.name not in result.reused and len(result.reused) == 1


@pytest.mark.parametrize("change", ["source", "options", "journal"])
def test_what_another_conversion_left_is_not_gone_on_with(half_done, target, change):
    options = {}
    if change == "source":
        os.utime(sorted(half_done.glob("*.safetensors"))[0])
    elif change == "options":
        options = {"granularity": "elementwise"}
    else:
        (target.parent / f".{target.name}.partial" / ".conversion-journal").write_text("not a journal")
    result = convert_checkpoint(half_done, target, **options)
    assert result.logits_equal and result.reused == ()


def test_other_files_that_a_killed_run_left_are_not_taken_over(half_done, target):
    partial = target.parent / f".{target.name}.partial"
    (partial / "old_notes.txt").write_text("removed from the source since")
    (partial / "images" / "deep").mkdir(parents=True, exist_ok=True)
    result = convert_checkpoint(half_done, target)
    assert len(result.reused) == 2
    assert not (target / "old_notes.txt").exists() and not (target / "images" / "deep").exists()


def test_a_run_that_met_a_full_disk_goes_on_where_it_was(sharded_source, target, monkeypatch):
    real_copyfile, copied = shutil.copyfile, []

    def full_disk(source, destination):
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))
        copied.append(destination.name)
        return real_copyfile(source, destination)

    monkeypatch.setattr(shutil, "copyfile", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert_checkpoint(sharded_source, target)
    monkeypatch.undo()
    result = convert_checkpoint(sharded_source, target)
    assert list(result.reused) == copied and result.logits_equal


def test_what_appears_at_the_target_meanwhile_is_not_lost(source, target, monkeypatch):
    from gated_attention.conversion import convert

    real_audit = convert.audit_headers

    def meanwhile(*arguments):
        real_audit(*arguments)
        target.mkdir()
        (target / "thesis.txt").write_text("the only copy")

    monkeypatch.setattr(convert, "audit_headers", meanwhile)
    for overwrite in (False, True):
        with pytest.raises(ConversionError, match=r"not empty|does not look like a model"):
            convert_checkpoint(source, target, overwrite=overwrite)
        assert (target / "thesis.txt").read_text() == "the only copy"
        shutil.rmtree(target)


def test_last_line_of_a_journal_may_be_cut_off(half_done, target):
    journal = target.parent / f".{target.name}.partial" / ".conversion-journal"
    journal.write_text(journal.read_text()[:-20])
    result = convert_checkpoint(half_done, target)
    assert result.logits_equal and len(result.reused) == 1


def test_second_process_on_the_same_target_is_refused(source, target):
    script = f"""
import time
from gated_attention.conversion import convert
convert.audit_headers = lambda *args: (print("ready", flush=True), time.sleep(60))
convert.convert_checkpoint({str(source)!r}, {str(target)!r})
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(ConversionError, match="another process"):
        convert_checkpoint(source, target)
    assert leftovers(target) == [f".{target.name}.lock", f".{target.name}.partial"]
    process.kill()
    process.communicate()
    assert_next_run_works(source, target)


def test_source_that_changes_while_it_is_read(sharded_source, target, monkeypatch):
    from gated_attention.conversion import convert

    real_write = convert.write_conversion

    def write_after_change(plan, folder):
        shard = sorted(sharded_source.glob("*.safetensors"))[1]
        other = save_source(target.parent / "other", tiny_llama(num_hidden_layers=2), sharded=True)
        shutil.copyfile(sorted(other.glob("*.safetensors"))[0], shard)
        real_write(plan, folder)

    monkeypatch.setattr(convert, "write_conversion", write_after_change)
    with pytest.raises(ConversionError, match="disagree"):
        convert_checkpoint(sharded_source, target)
    assert leftovers(target) == []
