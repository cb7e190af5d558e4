import gc
import sys

from fabric.short_pauses import SWITCH_S, keep_pauses_short


def test_what_is_there_is_not_walked_again():
    before_s = sys.getswitchinterval()
    kept = [[] for _ in range(1_000)]
    try:
        keep_pauses_short()
        assert gc.get_freeze_count() > len(kept)
        assert not any(item is kept for item in gc.get_objects())
        assert sys.getswitchinterval() == SWITCH_S
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before_s)
