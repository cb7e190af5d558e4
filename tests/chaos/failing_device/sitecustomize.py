"""Make the device of a node's process fail when a file with the process's pid exists.

Python imports this at its start if the folder is in PYTHONPATH. One operation computes wrong
values, as after a failed command buffer; its error is raised by the next synchronization. If a file
`unseen` exists beside the others, the error is never raised, and judges must detect wrong words.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

FOLDER = os.environ.get("MACFABRIC_CHAOS_DEVICE")
ENGINE = "node.mlx.engine"


class _Patching(MetaPathFinder):
    """Loader hook that patches the engine's module when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            _patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def _patch(module):
    import mlx.core as mx

    trigger, failed = Path(FOLDER, str(os.getpid())), []
    engine, device = module.Engine, module.device
    logits, extend, synchronize = engine._logits, engine._extend, device.synchronize

    def fails():
        if not trigger.exists():
            return False
        trigger.unlink(missing_ok=True)
        failed.append(not Path(FOLDER, "unseen").exists())
        return True

    def wrong_logits(self, tokens, layers):
        return logits(self, mx.zeros_like(tokens) if fails() else tokens, layers)

    def wrong_rows(self, cache, tokens):
        return extend(self, cache, [0] * len(tokens) if fails() else tokens)

    def raising():
        while failed:
            if failed.pop():
                message = "a command buffer failed, as chaos has it"
                raise device.DeviceError(message)
        synchronize()

    engine._logits, engine._extend, device.synchronize = wrong_logits, wrong_rows, raising


if FOLDER:
    sys.meta_path.insert(0, _Patching())
