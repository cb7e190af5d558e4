"""Planted faults in a node's handling of device errors."""

from contextlib import ExitStack, contextmanager

from node.engine import decode_step, scheduler
from node.engine.engine_thread import EngineThread
from tests.sim.replaced import replaced


def results_are_saved_unchecked():
    """A cache is read without waiting for errors of the operations that computed it."""
    return replaced(EngineThread, "_check_result", lambda _, work, failures_count: work())


@contextmanager
def an_error_of_the_device_ends_one_sequence():
    """Other sequences continue after a device error, as after an error of one sequence."""
    with ExitStack() as stack:
        for module in (decode_step, scheduler):
            stack.enter_context(replaced(module, "DeviceError", StopIteration))
        yield


DEVICE_PLANTS = (results_are_saved_unchecked, an_error_of_the_device_ends_one_sequence)
