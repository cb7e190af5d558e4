"""A whole node over damaged files of a window and of a hybrid model: misses, never wrong words.

Prompts are computed on the exact grid, so recomputed tokens are bit-equal to a cold run.
"""

import json
import random

import pytest

from fabric.control.node_calls import Done, Flush
from fabric.kvcache.block_file import tokens_by_file_bytes
from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.spec_file import decode_spec
from fabric.turn.generation import CacheTier, Delta
from node.fsck import run
from node.service import NodeService
from node.store.block_files import parse_leaf
from tests.support.architectures import ARCHITECTURES
from tests.support.samples import sample
from tests.support.services import KEY, Reply, ask, call, running
from tests.support.tiny_models import write_model

WORDS = "the cat sat on the mat and the dog sat on the log. größer 東京 "
OTHER = "naïve café on the mat. " * 8
GROUPS = {
    "gpt_oss": (CacheGroup.FULL, CacheGroup.WINDOW),
    "qwen3_5": (CacheGroup.FULL, CacheGroup.STATE),
}


def logprobs_of(reply: Reply) -> list[tuple[str, float]]:
    entries = (event.logprobs for event in reply.events if isinstance(event, Delta))
    return [(entry.token, entry.logprob) for group in entries for entry in group]


def prompt_of(service: NodeService, tokens_min: int) -> str:
    """Repeat words up to a length in tokens, since training a tokenizer is not repeatable."""
    prompt = WORDS
    while len(service.node.resources.tokenizer.encode(prompt).ids) < tokens_min:
        prompt += WORDS
    return prompt


def answer(service: NodeService, prompt: str, agent: str) -> Reply:
    return ask(service, prompt, agent=agent, max_tokens=4, logprobs=1, ignore_eos=True)


def files_of(service: NodeService, group: CacheGroup) -> list:
    folder = service._disk.root / "blocks"
    return sorted(p for p in folder.iterdir() if parse_leaf(p.name)[2] is group)


def flip_bits(files, rng) -> None:
    """Flip one bit in the first file's header and in each other file's payload."""
    for index, path in enumerate(files):
        size = path.stat().st_size
        flip(path, size - 1 - rng.randrange(size // 4) if index else rng.randrange(500))


def truncate(files, rng) -> None:
    for path in files:
        raw = path.read_bytes()
        path.write_bytes(raw[: rng.randrange(len(raw))])


def swap(files, rng) -> None:
    """Replace every file's content by the next one's, of the same length if possible."""
    contents = [path.read_bytes() for path in files]
    for path, other in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(other if len(files) > 1 else bytes(reversed(other)))


def flip(path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << at % 8
    path.write_bytes(raw)


@pytest.mark.nightly
@pytest.mark.parametrize("name", GROUPS)
def test_answers_over_damaged_files_equal_those_of_a_cold_run(name, tmp_path):
    model = str(write_model(tmp_path / name, ARCHITECTURES[name]))
    rng = random.Random(name)
    nodes = tmp_path / "data" / "nodes"
    with running(nodes, model, exact_chunks=True, scrub_bytes_per_s=0) as warm:
        prompt = prompt_of(warm, 520)
        cold = answer(warm, prompt, "agent")
        assert cold.admitted.cache is CacheTier.COLD
        want = logprobs_of(cold)
        other = logprobs_of(answer(warm, OTHER, "other"))
        call(warm, Flush(drop_hot=True), Done)
        restored = answer(warm, prompt, "agent")
        assert restored.admitted.cache is CacheTier.DISK
        assert logprobs_of(restored) == want
        for group in GROUPS[name]:
            sizes = tokens_by_file_bytes(warm.node.resources.identity.spec, group)
            for damage in (flip_bits, truncate, swap):
                call(warm, Flush(drop_hot=True), Done)
                full = [p for p in files_of(warm, group) if sizes.get(p.stat().st_size) == 256]
                assert full
                before = warm.node.view().damaged_blocks
                damage(full, rng)
                reply = answer(warm, prompt, "agent")

                assert logprobs_of(reply) == want, f"{damage.__name__} of {group}"
                assert reply.admitted.cached_tokens < restored.admitted.cached_tokens
                assert warm.node.view().damaged_blocks > before
                assert warm.node.health.degraded is None
                # All damage was detected and recomputed in one turn, not one block a turn.
                call(warm, Flush(drop_hot=True), Done)
                healed = answer(warm, prompt, "agent")
                assert logprobs_of(healed) == want
                assert healed.admitted.cached_tokens == restored.admitted.cached_tokens
        assert logprobs_of(answer(warm, OTHER, "other")) == other
        assert warm._disk.list_names("quarantine")


@pytest.mark.parametrize("name", sample(GROUPS, "qwen3_5"))
@pytest.mark.nightly
def test_damaged_folder_is_checked_repaired_and_served(name, tmp_path, capsys):
    """fsck refuses a running node, finds a stopped one sound, and repairs its damaged folder."""
    model = str(write_model(tmp_path / name, ARCHITECTURES[name]))
    data = tmp_path / "data"

    def check(*argv: str) -> tuple[int, dict]:
        capsys.readouterr()
        status = run.main([f"--data={data}", "--json", *argv])
        out = capsys.readouterr().out
        return status, json.loads(out)["folders"][0] if out else {}

    with running(data / "nodes", model, exact_chunks=True) as service:
        (data / "cluster.key").write_text(KEY.hex())
        prompt, spec = prompt_of(service, 520), service.node.resources.identity.spec
        want = logprobs_of(answer(service, prompt, "agent"))
        assert check()[0] == 2
        root = service._disk.root
    status, report = check()
    assert (status, report["findings"]) == (0, [])
    assert (report["records"], report["model"]) == (1, name)
    assert decode_spec((root / "model.spec").read_bytes()).spec == spec

    sizes = tokens_by_file_bytes(spec)
    [tail] = [p for p in (root / "blocks").glob("*.full") if sizes[p.stat().st_size] < 256]
    others = sorted((root / "blocks").glob(f"*.{GROUPS[name][1]}"))
    for path in (tail, others[0]):
        flip(path, -1)
    assert check()[0] == 1
    status, report = check("--repair")
    assert (status, report["problems_left"]) == (0, 0)
    assert check()[0] == 0
    with running(data / "nodes", model, exact_chunks=True) as service:
        [agent] = service.node.resources.table
        assert agent.manifest.is_truncated
        assert agent.manifest.tokens_count == 512
        stranger = ask(service, prompt, max_tokens=1)  # an unnamed agent
        assert stranger.admitted.agent != "agent"
        assert logprobs_of(answer(service, prompt, "agent")) == want
        assert not agent.manifest.is_truncated
        assert service.node.view().damaged_blocks == 0
