"""Bounds that nodes and the router share: name, unit last, and the reason.

Each package names its own in its `limits.py`; those of an HTTP server's connections are in
`fabric/hosting/limits.py`.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Blocks and files
BLOCK_TOKENS: Final = 256  # mlx-lm grows caches by 256; 9.4 MB for an 8B model at 4 bits
FILE_ALIGN_BYTES: Final = 16 * KIB  # page of Apple Silicon: lets Metal wrap a mapped file
HEADER_BYTES_MAX: Final = 1 * MIB  # 192 tensors need 20 KiB
BLOCK_BYTES_MAX: Final = 1 * GIB  # the state of Nemotron-H 56B is 864 MiB
MANIFEST_BYTES_MAX: Final = 64 * MIB
AGENT_TOKENS_MAX: Final = 1 << 20
TOKEN_TEXT_BYTES_MAX: Final = 1 * KIB  # of a record's text per token; the longest have 512 spaces
TEXT_SLACK_BYTES: Final = 64 * KIB  # beyond that: white space that a special token swallowed
WALL_S_MAX: Final = 253_402_300_799.0  # of any time in a record: the end of the year 9999
PIECES_MAX: Final = 1 << 14  # of one cache: four times those of the longest unedited one
DIRECTIVES_MAX: Final = 256  # of one agent
DIRECTIVE_BYTES_MAX: Final = 16 * KIB  # of text in the place of a message
DIRECTED_ID_CHARS_MAX: Final = 256  # of the tool call whose result one is about
DIRECTED_TEXT_CHARS_MAX: Final = 64 * KIB  # of a text that one is to find
CALL_IDS_KNOWN_MAX: Final = 1 << 14  # of one record; with more, it knows none
DECAY_S_MAX: Final = 1e9  # after which an agent is worth less; 31 years
UNDONE_SHOWN_MAX: Final = 64  # directives of one agent that were taken back, the newest
MESSAGE_GAP_BYTES_MAX: Final = 64 * KIB  # after a message: where the next is looked for
EDITS_NOTED_MAX: Final = 64  # of one agent, the newest
LENDERS_MAX: Final = 512  # noted in one record: two for each agent whose rows it holds
EDIT_CHUNKS_MAX: Final = 1 << 14  # special tokens of one prompt that is compared for edits
EDIT_KEPT_TOKENS_MIN: Final = 16  # fewer are computed sooner than they are moved
EDIT_MOVES_MAX: Final = 256  # of one prompt, the longest: attention turns the query for each
SPAN_CHUNK_TOKENS_MIN: Final = 16  # shorter ones are in too many texts
SPAN_CHUNK_TOKENS_MAX: Final = 128  # a run that two prompts share is found by one whole chunk of it
SPANS_MAX: Final = 64  # of other contexts in one prompt, the longest
EDIT_SINK_TOKENS: Final = 4  # at the start, which all others attend to: no edit before their end
PACKED_PIECES_MAX: Final = 1 << 14  # remembered in their packed form, 8 MB; 4M tokens' worth
ELIDED_CHARS_MAX: Final = 200  # of a placeholder that stands for a longer result
PASSING_TEXTS_KNOWN_MAX: Final = 1 << 14  # messages whose lasting part is remembered, 2 MB
BRANCHES_MAX: Final = 4  # superseded forms of one agent, the newest
ANSWERS_BYTES_MAX: Final = 128 * KIB  # of one agent, remembered for clients that change them
LAYERS_MAX: Final = 512
BLOCK_TENSORS_MAX: Final = 4_096  # 512 layers of eight; their header stays under its limit
SPEC_BYTES_MAX: Final = 4 * MIB  # a cache spec; 512 layers with all frequencies take 1 MiB
STATE_EVERY_TOKENS: Final = 4_096  # 77 MB for a large hybrid model, as much as 10k of its tokens
STATES_PER_AGENT_MAX: Final = 8
STATE_GAP_TOKENS_MIN: Final = 16  # fewer are computed sooner than a state is written
FLUSH_WAIT_S: Final = 90.0  # for turns that run when a flush is asked for; callers wait for 120

# Integrity
SPAN_SHARERS_MIN: Final = 2  # agents that begin with a block before it counts as popular

# Encryption at rest
ENCRYPTION_RETRY_S: Final = 300.0  # before a folder that could not be encrypted is tried again

# Retention
PIN_SHARE_MAX: Final = 0.25  # of a tenant's floor, so that pins cannot evict all its other agents
# Left free of a drive, whatever the budget says: systems swap and update there.
DISK_RESERVE_SHARE: Final = 0.1
DISK_RESERVE_BYTES_MIN: Final = 10 * GIB
DISK_RESERVE_BYTES_MAX: Final = 64 * GIB
TENANT_SHARES_MAX: Final = 1_024
RETAIN_S_MAX: Final = 86_400.0  # for which a client may say that it will come back
REUSE_TENANTS_MAX: Final = 5_120  # five classes of agents each
REUSE_COUNTS_MAX: Final = 1_024  # then halved: habits change

# HTTP
BODY_BYTES_MAX: Final = 32 * MIB  # a million tokens of text with room left over
MESSAGES_MAX: Final = 10_000
JSON_DEPTH_MAX: Final = 64
JSON_ITEMS_MAX: Final = 200_000  # values in one body; they take 0.2 s and 30 MB
INTEGER_CHARS_MAX: Final = 400  # of one integer in a long body; their cost grows with the square
TURN_ITEMS_MAX: Final = 1_000_000  # and on its way to a node, with tokens and parsed arguments
COMPLETION_TOKENS_MAX: Final = 131_072
MODEL_ALIASES_MAX: Final = 256
RETRY_AFTER_S_MAX: Final = 60.0  # clients of today take no longer one for their own back-off
TURN_BODY_BYTES_MAX: Final = BODY_BYTES_MAX + 2 * MIB  # the client's, and what the router adds
POLICIES_MAX: Final = 16  # that rewrite conversations: of a fabric, and of one request
POLICY_NAME_CHARS_MAX: Final = 64
ALLOWED_HOSTS_MAX: Final = 64  # names in settings, and as many origins
STOP_WAIT_S_MAX: Final = 3_600.0  # that a stop waits for running turns

# Structured output
GRAMMAR_BYTES_MAX: Final = 64 * KIB  # of a schema's text; what is let in compiles in 0.3 s
RULES_CHARS_MAX: Final = 8 * KIB  # of a regular expression or grammar that the client wrote
TEXT_RULES_CHARS_MAX: Final = 32 * KIB  # of such a grammar as rules of regular expressions
PATTERN_CHARS_MAX: Final = 1_024  # of one pattern, or one name, within a schema
SCHEMA_DEPTH_MAX: Final = 48  # levels of JSON; half as many of objects in objects
SCHEMA_PROPERTIES_MAX: Final = 512  # of one object; their cost grows with the square
SCHEMA_BRANCHES_MAX: Final = 128  # in one anyOf, oneOf, allOf; likewise
SCHEMA_PATTERNS_MAX: Final = 16  # whose patterns are compared with each other
SCHEMA_TEXT_CHARS_MAX: Final = 4_096  # of one text that is prescribed: 10 ms for each mask
CHOICES_MAX: Final = 1_000  # values of one enum, or texts to choose from

# Engine
WAITING_REQUESTS_MAX: Final = 256
ACTIVE_SEQUENCES_MAX: Final = 32
DEVICE_POOL_BYTES: Final = 512 * MIB  # of freed arrays that MLX keeps for later ones, on a GPU
DEVICE_RESERVE_BYTES: Final = 256 * MIB  # of a node's share: kernels, graphs, staging
DEVICE_BUFFERS_PART: Final = 0.8  # of the arrays that a GPU can hold; the rest are temporary
WORKING_SET_PART: Final = 0.75  # of the RAM, for models and caches where no GPU says
PREFILL_PART: Final = 8  # of a node's share, for the attention scores of one chunk of a prompt
PREFILL_BYTES_MIN: Final = 256 * MIB
PREFILL_BYTES_MAX: Final = 4 * GIB
HOT_BYTES_MIN: Final = 256 * MIB  # for agents' caches; with less a node does not start

# Control plane
CONTROL_BYTES_MAX: Final = MANIFEST_BYTES_MAX + 16 * MIB  # one travels with a ticket, also by HTTP
CONTROL_TIMEOUT_S: Final = 10.0
HEARTBEAT_S: Final = 1.0
TERM_MAX: Final = 1 << 27  # of routers; each has 2^21 epochs below EPOCH_MAX
TERM_LEASE_S: Final = 3.0  # without a renewal; then another router may have the next term
TERM_LEASE_S_MAX: Final = 60.0  # for which a voter promises itself to one router
ROUTER_NAME_CHARS_MAX: Final = 128  # of one life of a router's process
VOTERS_MAX: Final = 64  # of routers, beside the nodes
URL_CHARS_MAX: Final = 512  # of a router's own address

# Erasures
TOMBSTONES_MAX: Final = 16_384  # 3 MB in memory and 1.6 MB on their way to a node that was away
ERASED_S_MAX: Final = float(1 << 53)  # beyond every calendar
EPOCH_ERASED_MAX: Final = (1 << 53) - 1  # exact in JSON; 2^28 erasures of one name above EPOCH_MAX

# Data plane
FRAME_BYTES_MAX: Final = 1 * MIB
TICKET_BLOCKS_MAX: Final = 1 << 16
TRANSFER_SLICE_BYTES_MAX: Final = 2 * MIB  # lost where a connection breaks, as its MAC is last
HANDSHAKE_TIMEOUT_S: Final = 5.0

# Copies of agents
HEAD_TOKENS_MAX: Final = 1 << 19  # of a prompt, of which another node is asked: 300 KB of refs
HEAD_POLL_S_MAX: Final = 1.0  # that a node waits with an answer until a turn has published more
COPY_TIMEOUT_S: Final = 3_600.0  # one agent's; 50 GB over Wi-Fi take half of it
REPLICAS_MAX: Final = 7  # of one agent; a fabric is two to eight Macs
NODES_MAX: Final = 1_024  # of one fabric
PREFIX_SEEDING_TIMEOUT_S: Final = 300.0  # all of it, from all its peers
PREFETCH_TIMEOUT_S: Final = 120.0

# Links
PEERS_MAX: Final = 64  # whose links a node measures; the router names the nearest
ADDRESSES_MAX: Final = 16  # of one node
PROBE_BYTES_MAX: Final = 8 * MIB

# Router, and the fleet's events as dashboards follow them
SKETCH_PIECE_BYTES: Final = 512
SKETCH_PIECES_MAX: Final = 8_192

# Hibernation: one agent as one file
HIBERNATION_BYTES_MAX: Final = 64 * GIB  # a million tokens of an 8B model are 38 GB
HIBERNATION_FRAME_BYTES_MAX: Final = 1 * MIB  # what is held before its signature is checked
HIBERNATION_HEADER_BYTES_MAX: Final = 4 * KIB
HIBERNATION_GRACE_S: Final = 30.0  # for a file's first bytes, either way; then
HIBERNATION_BYTES_PER_S_MIN: Final = 128 * KIB  # of waiting for the client
MODEL_NAME_CHARS_MAX: Final = 512
EPOCH_MAX: Final = 1 << 48  # of a record from outside: above it, it could outlive every later owner
