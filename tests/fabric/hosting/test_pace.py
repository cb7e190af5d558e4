import pytest

from fabric.hosting.pace import Pace


def test_upload_deadline_grows_with_bytes_received():
    pace = Pace(bytes_per_s=100, grace_s=10)
    assert pace.left_s == 10
    pace.add(1, waited_s=9)
    assert pace.left_s == pytest.approx(1.01)
    pace.add(1, waited_s=1.5)
    assert pace.left_s == 0
    pace.add(1000, waited_s=0)
    assert 9 < pace.left_s < 10
    assert (pace.stalled_error().status, pace.stalled_error().code) == (408, "upload_stalled")
    assert "1002 bytes" in pace.stalled_error().message
