"""Run another program of ours, which the router may not import, as a child process."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from router.cli.errors import FAILED, INTERRUPTED

# `python -m`, without a traceback where Ctrl-C comes while modules are imported.
_RUN_MODULE = """
import sys
from runpy import run_module
module = sys.argv.pop(1)
try:
    run_module(module, run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def run_module(module: str, argv: Sequence[str], beside: Path | None = None) -> int:
    """Run `python -m module` to its end; return its exit status, 1 if a signal ended it.

    `beside` is the parent folder of a module that is not installed.
    """
    # -P: a file in the user's folder must not take the place of a module.
    command = [sys.executable, "-P", "-c", _RUN_MODULE, module, *argv]
    paths = [str(beside or ""), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(command, env=environment) as child:
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            status = child.wait()
        except KeyboardInterrupt:
            child.wait()  # the terminal has interrupted it as well
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else FAILED
