"""Configuration of a node, and facts that do not change while it runs."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from fabric.ids import Fingerprint, NodeName
from fabric.kvcache.cache_spec import ModelCacheSpec
from fabric.limits import BLOCK_TOKENS
from fabric.sampling_defaults import SamplingDefault
from fabric.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Configuration of a node."""

    name: NodeName
    data_dir: Path
    model: str
    cluster_key: bytes = field(repr=False)
    settings: NodeSettings
    host: str
    incarnation: int
    machine_nodes: int = 1  # nodes of this fabric that share the machine's memory
    tls: ssl.SSLContext | None = None  # None: plain HTTP, which real fabrics do not use
    certificate_ends_s: float | None = None  # wall clock


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a node serves."""

    name: str
    spec: ModelCacheSpec
    fingerprint: Fingerprint
    context_tokens_max: int
    vocabulary_size: int  # token ids that the model accepts
    problem: str | None = None  # why its caches cannot be kept
    sampling: tuple[SamplingDefault, ...] = ()  # defaults for fields that requests omit


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Facts that no part of a node changes."""

    config: NodeConfig
    model: ServedModel

    @property
    def name(self) -> NodeName:
        return self.config.name

    @property
    def settings(self) -> NodeSettings:
        return self.config.settings

    @property
    def cluster_key(self) -> bytes:
        return self.config.cluster_key

    @property
    def spec(self) -> ModelCacheSpec:
        return self.model.spec

    @property
    def fingerprint(self) -> Fingerprint:
        return self.model.fingerprint

    def usable_prefix(self, tokens_count: int) -> int:
        """Round a reusable prefix down to a length that the chunk policy allows."""
        if self.settings.exact_chunks:
            return tokens_count // BLOCK_TOKENS * BLOCK_TOKENS
        return tokens_count
