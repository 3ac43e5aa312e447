"""``scaledot run --resume``: what is left of a run that was stopped, and how it goes on."""

import json
import os
import signal
import time

import numpy as np
import pytest

import scaledot as sd
from cli_runs import (
    OUTPUT_FORMATS,
    SMALL_SIZES,
    invoke,
    launch,
    load,
    one_line,
    operands,
    same_bits,
    save,
    shrink,
    succeed,
)
from scaledot.cli import _job, _output, _partial
from test_cli_stream import LEN_KV, LEN_Q, check

SETTINGS = "import scaledot.cli._attend as a, scaledot.cli._job as j, scaledot.cli._output as o\n"
SETTINGS += "".join(f"j.{name} = {size}\n" for name, size in SMALL_SIZES.items())
SETTINGS += f"a.BLOCK_BYTES = {SMALL_SIZES['BLOCK_BYTES']}\n"
SETTINGS += "a.BLOCK_SECONDS = o.SYNC_SECONDS = 0.0\n"


@pytest.fixture
def small(monkeypatch):
    """Sizes at which few keys are many."""
    shrink(monkeypatch)


def stop_after(monkeypatch, name, calls, error=KeyboardInterrupt):
    """Make a function of the package raise an error after some calls; count them in a list."""
    count, function = [], getattr(sd, name)

    def counting(*arguments, **options):
        if len(count) == calls:
            raise error
        count.append(1)
        return function(*arguments, **options)

    monkeypatch.setattr(sd, name, counting)
    return count


@pytest.fixture
def stopped(tmp_path, small):
    """A run under --resume that was interrupted: its arguments, and its arrays."""
    arrays = operands(LEN_Q, LEN_KV)
    files = save(tmp_path, ".npy", arrays)
    arguments = [*files, "-o", tmp_path / "out.npy", "--causal"]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, "attention_state", 30)
        result = invoke(*arguments, "--resume")
    assert result.exit_code == 130
    assert sorted(os.listdir(tmp_path / "out.npy.partial")) == ["journal", "lock", "rows.npy"]
    return arguments, arrays


def test_an_interrupted_run_is_continued(tmp_path, stopped, monkeypatch):
    arguments, arrays = stopped
    done = stop_after(monkeypatch, "attention_state", -1)
    succeed(*arguments, "--resume")
    continued = len(done)
    got = load(tmp_path / "out.npy")
    assert not (tmp_path / "out.npy.partial").exists()
    succeed(*arguments, "--force")
    assert same_bits(got, load(tmp_path / "out.npy"))
    assert continued < len(done) - continued < continued + 30
    check(got, arrays, causal=True)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("output", [
    OUTPUT_FORMATS[0], *(pytest.param(x, marks=pytest.mark.heavy) for x in OUTPUT_FORMATS[1:])
])  # fmt: skip
def test_a_killed_run_is_continued(tmp_path, monkeypatch, request, output, streamed):
    arrays = operands(LEN_Q, LEN_KV)
    request.getfixturevalue("small")
    settings, name = SETTINGS, "attention_state"
    if not streamed:  # blocks of queries, with all keys at hand
        settings, name = settings + "j.BUDGET = 2**30\n", "attention"
        monkeypatch.setattr(_job, "BUDGET", 2**30)
    slow = (
        f"{settings}import scaledot, time\nf = scaledot.{name}\n"
        f"scaledot.{name} = lambda *a, **o: (time.sleep(0.02), f(*a, **o))[1]"
    )
    out = tmp_path / f"out{output}"
    arguments = [*save(tmp_path, ".npy", arrays), "-o", out, "--threads", "1"]
    process = launch(arguments, before=slow)
    journal = tmp_path / f"{out.name}.partial" / "journal"
    while process.poll() is None and not (journal.exists() and journal.read_bytes().count(10) > 2):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, stderr
    assert not out.exists()
    refused = one_line(invoke(*arguments).stderr)
    assert "--resume to continue" in refused
    done = stop_after(monkeypatch, name, -1)
    succeed(*arguments, "--resume")
    continued, got = len(done), load(out)
    succeed(*arguments, "--force")
    assert continued < len(done) - continued
    assert same_bits(got, load(out))
    assert sorted(os.listdir(tmp_path)) == sorted(
        [out.name, "key.npy", "query.npy", "value.npy"]
    )


def test_a_failure_before_the_end_is_continued_too(tmp_path, stopped, monkeypatch):
    arguments, _ = stopped
    for error in (MemoryError, ZeroDivisionError):
        with monkeypatch.context() as patch:
            stop_after(patch, "attention_state", 10, error)
            assert invoke(*arguments, "--resume").exit_code != 0
        assert (tmp_path / "out.npy.partial" / "journal").exists()
    with monkeypatch.context() as patch:
        patch.setattr(_output.Output, "_place", lambda self, finished: 1 / 0)
        assert isinstance(invoke(*arguments, "--resume").exception, ZeroDivisionError)
    done = stop_after(monkeypatch, "attention_state", -1)
    succeed(*arguments, "--resume")
    assert done == []  # all rows were there


def test_what_differs_is_told(tmp_path, stopped):
    arguments, _ = stopped
    journal = tmp_path / "out.npy.partial" / "journal"
    before = journal.read_bytes()

    def refused(*changed):
        message = one_line(invoke(*changed, "--resume").stderr)
        assert journal.read_bytes() == before
        return message

    assert "got scale 0.5 instead of None. " in refused(*arguments, "--scale", "0.5")
    without = refused(*arguments[:-1])
    assert "causal False instead of True" in without
    assert "--force without --resume" in without
    assert "dtype float64 instead of float32" in refused(*arguments, "--dtype", "float64")
    np.save(tmp_path / "other.npy", np.zeros((LEN_Q, LEN_KV)))
    assert "bias " in refused(*arguments, "--bias", tmp_path / "other.npy")
    os.utime(tmp_path / "key.npy", ns=(0, 12_345))
    message = refused(*arguments)
    assert "changed 12345) instead of" in message
    assert "value" not in message


def test_without_resume_a_stopped_run_is_kept_or_replaced(tmp_path, stopped, monkeypatch):
    arguments, arrays = stopped
    with monkeypatch.context() as patch:
        patch.setattr(sd, "attention_state", None)
        assert "Pass --resume to continue it, or --force" in one_line(invoke(*arguments).stderr)
    assert (tmp_path / "out.npy.partial" / "journal").exists()
    with monkeypatch.context() as patch:
        stop_after(patch, "attention_state", 30)
        assert invoke(*arguments, "--force").exit_code == 130
    assert not (tmp_path / "out.npy.partial").exists()
    succeed(*arguments, "--resume")  # nothing is left: a new run
    check(load(tmp_path / "out.npy"), arrays, causal=True)


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_torn_entry_of_the_journal(tmp_path, stopped, cut, monkeypatch):
    arguments, arrays = stopped
    journal = tmp_path / "out.npy.partial" / "journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 2
    journal.write_bytes(b"".join(lines)[:-cut])
    done = stop_after(monkeypatch, "attention_state", -1)
    succeed(*arguments, "--resume")
    check(load(tmp_path / "out.npy"), arrays, causal=True)
    continued = len(done)
    succeed(*arguments, "--force")
    assert continued < len(done) - continued


def test_a_damaged_journal_ends_where_the_damage_begins(stopped, tmp_path):
    arguments, arrays = stopped
    journal = tmp_path / "out.npy.partial" / "journal"
    head, *lines = journal.read_bytes().splitlines()
    for second in (b"\0" * 9, b"[0, 1, 2]", b"[0]", b'"x"', lines[0]):
        journal.write_bytes(b"\n".join([head, lines[0], second, *lines[1:], b""]))
        partial = _partial.Partial(tmp_path / "out.npy")
        call = json.loads(head)["call"]
        place = partial.left(call, lambda place: True, resume=True, force=False)
        assert list(place) == json.loads(lines[0])
        assert journal.read_bytes() == head + b"\n" + lines[0] + b"\n"
    succeed(*arguments, "--resume")
    check(load(tmp_path / "out.npy"), arrays, causal=True)


def test_impossible_entries_of_the_journal_count_as_damage(stopped, tmp_path, monkeypatch):
    arguments, arrays = stopped
    journal = tmp_path / "out.npy.partial" / "journal"
    head, first, *_ = journal.read_bytes().splitlines()
    rows = json.loads(first)[1]
    assert 0 < rows < LEN_Q - 1
    lines = ([0, rows + 1], [0, LEN_Q + 1], [0, 2**70], [1, 0], [1, -rows], [4, LEN_Q], [4, rows])
    for line in lines:
        journal.write_bytes(b"\n".join([head, first, json.dumps(line).encode(), b""]))
        with monkeypatch.context() as patch:
            stop_after(patch, "attention_state", 0)
            assert invoke(*arguments, "--resume").exit_code == 130
        assert journal.read_bytes() == head + b"\n" + first + b"\n"
    succeed(*arguments, "--resume")
    check(load(tmp_path / "out.npy"), arrays, causal=True)


@pytest.mark.parametrize("streamed", [True, False])
def test_runs_stop_where_the_job_says_so(tmp_path, small, monkeypatch, streamed):
    if not streamed:
        monkeypatch.setattr(_job, "BUDGET", 2**30)
    arrays, found, jobs = operands(LEN_Q, LEN_KV), [], []
    record, call = _output.Output.record, _job.Job.call
    monkeypatch.setattr(
        _output.Output, "record", lambda self, *place: (found.append(place), record(self, *place))
    )
    monkeypatch.setattr(_job.Job, "call", lambda self: (jobs.append(self), call(self))[1])
    succeed(*save(tmp_path, ".npy", arrays), "-o", tmp_path / "out.npy", "--threads", 1)
    (work,) = jobs
    assert work.streamed == streamed
    assert len(work.parts) == (4 if streamed else 1)
    everything = {(part, rows) for part in range(-1, 6) for rows in range(-1, LEN_Q + 9)}
    possible = {place for place in everything if work.may_stop(place)}
    assert len(found) > 2
    assert possible == set(found)  # blocks are as short as they get


@pytest.mark.parametrize("reserve", [True, False])
def test_room_is_taken_again(tmp_path, stopped, monkeypatch, reserve):
    arguments, _ = stopped
    rows = tmp_path / "out.npy.partial" / "rows.npy"
    whole = rows.read_bytes()
    with rows.open("wb") as file:  # as some programs copy files: zeros take no room
        for start in range(0, len(whole), 4096):
            piece = whole[start : start + 4096]
            if any(piece):
                file.seek(start)
                file.write(piece)
        file.truncate(len(whole))
    if 512 * rows.stat().st_blocks >= len(whole):
        pytest.skip("a file system without holes")
    if not reserve:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with monkeypatch.context() as patch:
        stop_after(patch, "attention_state", 0)
        assert invoke(*arguments, "--resume").exit_code == 130
    assert rows.read_bytes() == whole
    assert 512 * rows.stat().st_blocks >= len(whole)


def test_damaged_remains_are_refused(tmp_path, stopped):
    arguments, arrays = stopped
    folder = tmp_path / "out.npy.partial"
    rows, journal = folder / "rows.npy", folder / "journal"
    whole = rows.read_bytes()
    for damaged in (whole[:50], whole[:200], whole[:-1], whole + b"\0"):
        rows.write_bytes(damaged)
        message = one_line(invoke(*arguments, "--resume").stderr)
        assert f"{rows} must hold the rows" in message
        assert "a damaged file (" in message
        assert rows.read_bytes() == damaged
    others = (np.zeros(3), np.zeros((2, 4, LEN_Q, 5), np.int32),
              np.asfortranarray(np.zeros((2, 4, LEN_Q, 5), np.float32)))
    for other in others:
        np.save(rows, other)
        assert "another array" in one_line(invoke(*arguments, "--resume").stderr)
    rows.write_bytes(whole)
    text = journal.read_bytes()
    journal.write_bytes(b"x" + text)
    assert "must be the journal" in one_line(invoke(*arguments, "--resume").stderr)
    journal.write_bytes(text.partition(b"\n")[0][:40])  # nothing was recorded
    succeed(*arguments, "--resume")
    check(load(tmp_path / "out.npy"), arrays, causal=True)


def test_two_runs_do_not_mix(tmp_path, stopped):
    arguments, arrays = stopped
    other = _partial.Partial(tmp_path / "out.npy")
    other.open()
    for option in ("--resume", "--force"):
        assert "one run at a time" in one_line(invoke(*arguments, option).stderr)
    other.close(remove=False)
    succeed(*arguments, "--resume")
    check(load(tmp_path / "out.npy"), arrays, causal=True)


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    files = save(tmp_path, ".npz", operands())
    folder = tmp_path / "out.npy.partial"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    for option in ("--force", "--resume"):
        message = one_line(invoke(*files, "-o", tmp_path / "out.npy", option).stderr)
        assert "thesis.txt" in message
    assert os.listdir(folder) == ["thesis.txt"]
    (folder / "thesis.txt").unlink()
    folder.rmdir()
    folder.write_text("precious")
    assert "a file" in one_line(invoke(*files, "-o", tmp_path / "out.npy", "--force").stderr)
    assert folder.read_text() == "precious"


def test_rows_are_on_disk_before_they_are_recorded(tmp_path, small, monkeypatch):
    order = []
    flush, record = np.memmap.flush, _partial.Partial.record

    def flushing(self):
        order.append("rows")
        flush(self)

    def recording(self, call, place):
        order.append("journal")
        record(self, call, place)

    monkeypatch.setattr(np.memmap, "flush", flushing)
    monkeypatch.setattr(_partial.Partial, "record", recording)
    succeed(*save(tmp_path, ".npy", operands(LEN_Q, LEN_KV)), "-o", tmp_path / "out.npy")
    assert order[:-1] == ["rows", "journal"] * (len(order) // 2)
    assert len(order) > 8
