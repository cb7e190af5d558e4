"""Every parser of bytes from outside: valid inputs, mutations, and allowed exceptions."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fabric.codec import parse_json
from fabric.control.calls import decode_call
from fabric.errors import CorruptDataError, RejectedError
from fabric.net.ticket import issue_ticket, open_ticket
from fabric.record.spec_file import MAGIC as SPEC_MAGIC
from fabric.record.spec_file import decode_spec
from fabric.settings import parse_settings
from tests.fuzz.agent_file_inputs import (
    RAISES,
    agent_file_seeds,
    parse_agent_file,
    rebuilt_agent_file,
)
from tests.fuzz.file_inputs import (
    block_seeds,
    checksummed,
    enclosed,
    header_seeds,
    parse_any_header,
    parse_block_file,
    parse_record,
    rebuilt_block,
    rebuilt_header,
    rebuilt_record,
    record_seeds,
    spec_seeds,
)
from tests.fuzz.message_inputs import (
    TICKET,
    call_seeds,
    decompress,
    frame_seeds,
    parse_frame,
    rebuilt_call,
    rebuilt_frame,
    rebuilt_json,
    rebuilt_slice,
    rebuilt_ticket,
    settings_seeds,
    slice_seeds,
)
from tests.fuzz.mutation import mutate_bytes
from tests.support.blocks import (
    CLUSTER_KEY,
)

Rng = random.Random


@dataclass(frozen=True)
class Target:
    """A parser and the sources of its inputs."""

    parse: Callable[[bytes], object]
    raises: type[Exception] | tuple[type[Exception], ...]
    seeds: list[bytes]  # each of them is accepted
    rebuild: Callable[[Rng, bytes], bytes]  # mutates the contents, then repairs the envelope
    allocated_bytes_max: int = 1 << 20  # in addition to 64 for each byte of input

    def hostile(self, rng: Rng) -> bytes:
        """Make one input, mostly from a valid one, sometimes of noise."""
        chance, seed = rng.random(), rng.choice(self.seeds)
        if chance < 0.55:
            return self.rebuild(rng, seed)
        if chance < 0.95:
            return mutate_bytes(rng, seed, self.seeds)
        return rng.randbytes(rng.choice((0, 1, 8, 40, 400)))


TARGETS = {
    "safetensors header": Target(
        parse_any_header, CorruptDataError, header_seeds(), rebuilt_header
    ),
    "block header": Target(parse_block_file, CorruptDataError, block_seeds(), rebuilt_block),
    "manifest": Target(
        parse_record,
        CorruptDataError,
        record_seeds(),
        rebuilt_record,
    ),
    "cache spec": Target(
        decode_spec,
        CorruptDataError,
        spec_seeds(),
        partial(enclosed, partial(checksummed, SPEC_MAGIC), len(SPEC_MAGIC) + 16),
    ),
    "agent file": Target(parse_agent_file, RAISES, agent_file_seeds(), rebuilt_agent_file),
    "wire frame": Target(parse_frame, RejectedError, frame_seeds(), rebuilt_frame),
    "ticket": Target(
        partial(open_ticket, CLUSTER_KEY),
        RejectedError,
        [issue_ticket(CLUSTER_KEY, TICKET)],
        rebuilt_ticket,
    ),
    "control call": Target(decode_call, RejectedError, call_seeds(), rebuilt_call),
    "zstd slice": Target(decompress, CorruptDataError, slice_seeds(), rebuilt_slice),
    "settings": Target(
        lambda raw: parse_settings(parse_json(raw)), RejectedError, settings_seeds(), rebuilt_json
    ),
}
