"""`macfabric down` during a stop: progress, and no second signal unless requested."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from router.cli.data_folder import DataFolder
from router.supervise.processes import identify

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
# A stand-in for `up` that counts its signals; as in `up`, the second one ends it at once.
STOPPING_UP = """
import signal, sys, time
from pathlib import Path
from router.cli.data_folder import DataFolder
folder, got = DataFolder(Path(sys.argv[1])), []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
print("up", flush=True)
while not got:
    time.sleep(0.05)
for left in range(8, 0, -1):
    folder.write_stop_progress({"event": "draining", "turns": 2, "left_s": float(left)})
    time.sleep(1.0)
    if len(got) > 1:
        break
folder.stop_progress.unlink()
print(len(got), flush=True)
"""


class StoppingUp:
    """A stand-in process for `up` that counts its signals."""

    def __init__(self, folder):
        self.folder = folder
        argv = [sys.executable, "-c", STOPPING_UP, str(folder.path)]
        self.popen = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout.readline() == "up\n"
        folder.write_run(identify(self.popen.pid), {}, stop_wait_s=30.0)
        self.signals = 0
        self._reaping = threading.Thread(target=self._reap)
        self._reaping.start()

    def _reap(self):
        text, _ = self.popen.communicate()
        self.signals = int(text or 0)

    def end(self):
        self.popen.kill()
        self._reaping.join()


@pytest.fixture
def up(tmp_path):
    folder = DataFolder(tmp_path)
    folder.create()
    stopping = StoppingUp(folder)
    yield stopping
    stopping.end()


def begin_down(up, *options):
    argv = [sys.executable, "-m", "router.cli.main", "down", "--data", str(up.folder.path)]
    pipe = subprocess.PIPE
    return subprocess.Popen([*argv, *options], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def down(up, *options):
    process = begin_down(up, *options)
    out, errors = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@pytest.mark.parametrize(("options", "signals"), [((), 1), (("--wait", "0"), 2)])
def test_second_down_cuts_turns_only_with_wait_0(up, options, signals):
    first = begin_down(up, "--json")
    rows = [json.loads(first.stderr.readline()) for _ in range(2)]
    second = down(up, *options)
    out, _ = first.communicate(timeout=DEADLINE_S)
    up.end()
    assert (second.returncode, up.signals) == (0, signals), second.stderr
    assert "already stopping" in second.stderr
    assert json.loads(out)["was"] == "running"
    assert rows[0] == {"event": "asked", "pid": up.popen.pid, "wait_s": 30.0}
    assert (rows[1]["event"], rows[1]["turns"]) == ("draining", 2)


def test_down_shows_progress_in_words(up):
    done = down(up)
    assert "asking process" in done.stderr
    assert "waiting for running turns: 2, up to" in done.stderr
