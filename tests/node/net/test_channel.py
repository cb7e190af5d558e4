"""Slices arrive whole when their headers are received with the previous slice."""

import itertools
import random
import socket
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest

from fabric.errors import NotFoundError, RejectedError
from fabric.limits import KIB
from fabric.net.wire import MAC_BYTES, FetchPart, Goodbye, PayloadHead, encode_frame
from node.limits import TRANSFER_SLICE_BYTES_MIN
from node.net.channel import AHEAD_BYTES, Channel
from node.net.frame_mac import TamperedError
from node.transfer.payload import Compressor, receive_slice, send_range
from node.transfer.urgency_gate import UrgencyGate

KEYS = b"1" * 32, b"2" * 32
# The shortest are shorter than the read-ahead.
LENGTHS = (1, 2, 15, 16, 17, 40, 300 * KIB, 1, 86, 70_000)


@contextmanager
def closing_pair(left_now_s=time.monotonic, *, encrypts=True):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    left, right = Channel(dialled, left_now_s, 30.0), Channel(accepted, time.monotonic, 30.0)
    left.seal(*KEYS, encrypts=encrypts)
    right.seal(*reversed(KEYS), encrypts=encrypts)
    with closing(left), closing(right):
        yield left, right


@pytest.fixture(params=[True, False], ids=["encrypted", "readable"])
def channel_pair(request):
    with closing_pair(encrypts=request.param) as pair:
        yield pair


def send_slices(channel, payload, lengths):
    offset = 0
    for length in lengths:
        channel.room(length)[:] = payload[offset : offset + length]
        channel.send_slice(PayloadHead(0, offset, length, length))
        offset += length


def receive_slices(channel, total, count):
    got, offset = bytearray(total), 0
    for _ in range(count):
        head = receive_slice(channel, 0, offset, total - offset, lambda: memoryview(got))
        offset += head.length
    return bytes(got)


def test_read_ahead_is_no_longer_than_the_shortest_slice():
    shortest = encode_frame(PayloadHead(0, 0, 1, 1)) + bytes(2 * MAC_BYTES) + b"1"
    assert len(shortest) >= AHEAD_BYTES


def test_consecutive_slices_of_all_lengths_arrive(channel_pair):
    payload = random.Random(1).randbytes(sum(LENGTHS))
    sending = threading.Thread(target=send_slices, args=(channel_pair[0], payload, LENGTHS))
    sending.start()
    assert receive_slices(channel_pair[1], len(payload), len(LENGTHS)) == payload
    sending.join()
    assert channel_pair[1].is_quiet()


def test_last_slice_arrives_without_a_successor(channel_pair):
    send_slices(channel_pair[0], b"abc", [3])
    got = bytearray(9)
    head = receive_slice(channel_pair[1], 0, 0, 9, lambda: memoryview(got))
    assert (head.length, bytes(got[:3])) == (3, b"abc")


def test_refusal_after_a_slice_is_read(channel_pair):
    send_slices(channel_pair[0], b"abc", [3])
    thread = threading.Thread(target=channel_pair[0].refuse, args=(NotFoundError("gone"),))
    thread.start()
    got = bytearray(9)
    receive_slice(channel_pair[1], 0, 0, 9, lambda: memoryview(got))
    with pytest.raises(RejectedError, match="gone"):
        receive_slice(channel_pair[1], 0, 3, 6, lambda: memoryview(got))
    channel_pair[1].close()
    thread.join()


def test_header_read_ahead_is_authenticated(channel_pair):
    left, right = channel_pair
    send_slices(left, b"abc", [3])
    left._sock.sendall(encode_frame(PayloadHead(0, 3, 6, 6)) + bytes(60))
    got = bytearray(9)
    receive_slice(right, 0, 0, 9, lambda: memoryview(got))
    with pytest.raises(TamperedError):
        receive_slice(right, 0, 3, 6, lambda: memoryview(got))
    assert bytes(got[3:]) == bytes(6)


@dataclass(frozen=True)
class Zeros:
    """A payload without a file."""

    length: int

    def read_into(self, view, offset):
        view[:] = bytes(len(view))


def test_sender_yields_once_before_each_slice(channel_pair):
    payload = Zeros(900 * KIB)
    part = FetchPart(b"h" * 32, b"c" * 16, 0, 900 * KIB)
    passed = []
    receiving = threading.Thread(target=receive_slices, args=(channel_pair[1], part.length, 3))
    receiving.start()
    slices = send_range(
        channel_pair[0], payload, 0, part, 0, Compressor(), lambda: passed.append(1)
    )
    sent = [(len(passed), count) for count in slices]
    receiving.join()
    assert [number for number, _ in sent] == list(range(1, len(sent) + 1))
    assert sum(count for _, count in sent) == part.length
    assert len(passed) == len(sent)


def test_only_more_urgent_sender_on_the_same_link_delays_others():
    gate = UrgencyGate(lambda: 0.0)
    with gate.sending("a", 0) as idle:
        assert not gate.before_slice(idle)
        with gate.sending("b", 3), gate.sending("a", 0):
            assert not gate.before_slice(idle)
        with gate.sending("a", 3) as urgent:
            assert not gate.before_slice(urgent)
            assert gate.before_slice(idle)
        assert not gate.before_slice(idle)


@pytest.mark.parametrize("waited_s", [0.0, 1.0])
def test_first_slice_is_small_only_after_waiting_for_a_request(waited_s):
    now_s = itertools.count(0.0, waited_s)
    with closing_pair(lambda: next(now_s)) as (sender, requester):
        sender._slice_bytes = grown_bytes = 4 * TRANSFER_SLICE_BYTES_MIN
        requester.send(Goodbye())
        sender.receive(Goodbye)
        began_bytes = TRANSFER_SLICE_BYTES_MIN if waited_s else grown_bytes
        assert sender.slice_bytes == began_bytes
