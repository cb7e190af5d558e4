"""Bounds that nodes and the router share: name with its unit last, and what it bounds or why.

Each package names its own bounds in its `limits.py`; those of an HTTP server's connections are in
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
TEXT_SLACK_BYTES: Final = 64 * KIB  # beyond that: white space that special tokens absorbed
WALL_S_MAX: Final = 253_402_300_799.0  # of any time in a record: the end of the year 9999
PIECES_MAX: Final = 1 << 14  # of one cache: four times those of the longest unedited one
DIRECTIVES_MAX: Final = 256  # of one agent
DIRECTIVE_BYTES_MAX: Final = 16 * KIB  # of the text that replaces a message
DIRECTED_ID_CHARS_MAX: Final = 256  # of the call id that a directive names
DIRECTED_TEXT_CHARS_MAX: Final = 64 * KIB  # of the text that a directive searches for
CALL_IDS_KNOWN_MAX: Final = 1 << 14  # of one record; if it has more, none are recorded
DECAY_S_MAX: Final = 1e9  # idle time until an agent decays; 31 years
UNDONE_SHOWN_MAX: Final = 64  # undone directives of one agent, the newest
MESSAGE_GAP_BYTES_MAX: Final = 64 * KIB  # after a message: range searched for the next one
EDITS_NOTED_MAX: Final = 64  # of one agent, the newest
LENDERS_MAX: Final = 512  # noted in one record: two for each agent whose rows it holds
EDIT_CHUNKS_MAX: Final = 1 << 14  # special tokens of one prompt that is compared for edits
EDIT_KEPT_TOKENS_MIN: Final = 16  # computing fewer is faster than moving them
EDIT_MOVES_MAX: Final = 256  # of one prompt, the longest: attention turns the query for each
SPAN_CHUNK_TOKENS_MIN: Final = 16  # shorter chunks occur in too many texts
SPAN_CHUNK_TOKENS_MAX: Final = 128  # a run that two prompts share is found by one whole chunk in it
SPANS_MAX: Final = 64  # of other contexts in one prompt, the longest
EDIT_SINK_TOKENS: Final = 4  # first tokens, to which all others attend: never edited
PACKED_PIECES_MAX: Final = 1 << 14  # cached in packed form: 8 MB, of 4M tokens
ELIDED_CHARS_MAX: Final = 200  # of a placeholder that stands for a longer result
PASSING_TEXTS_KNOWN_MAX: Final = 1 << 14  # messages whose lasting part is cached; 2 MB
BRANCHES_MAX: Final = 4  # superseded forms of one agent, the newest
ANSWERS_BYTES_MAX: Final = 128 * KIB  # of one agent, remembered for clients that change them
LAYERS_MAX: Final = 512
BLOCK_TENSORS_MAX: Final = 4_096  # 512 layers of eight; their header stays under its limit
SPEC_BYTES_MAX: Final = 4 * MIB  # a cache spec; 512 layers with all frequencies take 1 MiB
STATE_EVERY_TOKENS: Final = 4_096  # 77 MB for a large hybrid model, as much as 10k of its tokens
STATES_PER_AGENT_MAX: Final = 8
STATE_GAP_TOKENS_MIN: Final = 16  # computing fewer is faster than writing a state
FLUSH_WAIT_S: Final = 90.0  # wait of a flush for running turns; its callers wait 120 s

# Integrity
SPAN_SHARERS_MIN: Final = 2  # agents that must begin with a block before it counts as popular

# Encryption at rest
ENCRYPTION_RETRY_S: Final = 300.0  # before encrypting a folder is retried

# Retention
PIN_SHARE_MAX: Final = 0.25  # of a tenant's floor, so that pins cannot evict all its other agents
# Space left free on a drive, whatever the budget: macOS swaps and updates there.
DISK_RESERVE_SHARE: Final = 0.1
DISK_RESERVE_BYTES_MIN: Final = 10 * GIB
DISK_RESERVE_BYTES_MAX: Final = 64 * GIB
TENANT_SHARES_MAX: Final = 1_024
RETAIN_S_MAX: Final = 86_400.0  # time within which a client may announce to return
REUSE_TENANTS_MAX: Final = 5_120  # five classes of agents each
REUSE_COUNTS_MAX: Final = 1_024  # then halved, as old habits count less

# HTTP
BODY_BYTES_MAX: Final = 32 * MIB  # a million tokens of text with room left over
MESSAGES_MAX: Final = 10_000
JSON_DEPTH_MAX: Final = 64
JSON_ITEMS_MAX: Final = 200_000  # values in one body; they take 0.2 s and 30 MB
INTEGER_CHARS_MAX: Final = 400  # of one integer in a long body; their cost grows with the square
TURN_ITEMS_MAX: Final = 1_000_000  # values of a turn on its way to a node, with its tokens
COMPLETION_TOKENS_MAX: Final = 131_072
MODEL_ALIASES_MAX: Final = 256
RETRY_AFTER_S_MIN: Final = 1.0
RETRY_AFTER_S_MAX: Final = 60.0  # current clients ignore longer values
TURN_BODY_BYTES_MAX: Final = BODY_BYTES_MAX + 2 * MIB  # the client's, and what the router adds
POLICIES_MAX: Final = 16  # policies of a fabric, and of one request
POLICY_NAME_CHARS_MAX: Final = 64
ALLOWED_HOSTS_MAX: Final = 64  # hosts in the settings, and as many origins
STOP_WAIT_S_MAX: Final = 3_600.0  # wait of a stop for running turns

# Structured output
GRAMMAR_BYTES_MAX: Final = 64 * KIB  # of a schema's text; smaller ones compile in 0.3 s
RULES_CHARS_MAX: Final = 8 * KIB  # of a regular expression or grammar that the client wrote
TEXT_RULES_CHARS_MAX: Final = 32 * KIB  # of such a grammar as rules of regular expressions
PATTERN_CHARS_MAX: Final = 1_024  # of one pattern, or one name, within a schema
SCHEMA_DEPTH_MAX: Final = 48  # levels of JSON; half as many of objects in objects
SCHEMA_PROPERTIES_MAX: Final = 512  # of one object; their cost grows with the square
SCHEMA_BRANCHES_MAX: Final = 128  # in one anyOf, oneOf, allOf; likewise
SCHEMA_PATTERNS_MAX: Final = 16  # of one object, compared with each other
SCHEMA_TEXT_CHARS_MAX: Final = 4_096  # of one constant text: 10 ms for each mask
CHOICES_MAX: Final = 1_000  # values of one enum, or texts to choose from

# Engine
WAITING_REQUESTS_MAX: Final = 256
QUEUED_TURNS_MAX: Final = 1_024  # in the router, for one node: as many requests as are served
TENANT_WEIGHT_MIN: Final = 0.01  # of queues: a hundredth of a usual tenant's part
TENANT_WEIGHT_MAX: Final = 100.0
ACTIVE_SEQUENCES_MAX: Final = 32
DEVICE_POOL_BYTES: Final = 512 * MIB  # of freed arrays that are kept for reuse
DEVICE_RESERVE_BYTES: Final = 256 * MIB  # of a node's share: kernels, graphs, staging
DEVICE_BUFFERS_PART: Final = 0.8  # of the arrays that a GPU can hold; the rest are temporary
WORKING_SET_PART: Final = 0.75  # of the RAM, for models and caches, if no GPU recommends a size
PREFILL_PART: Final = 8  # of a node's share, for the attention scores of one chunk of a prompt
PREFILL_BYTES_MIN: Final = 256 * MIB
PREFILL_BYTES_MAX: Final = 4 * GIB
HOT_BYTES_MIN: Final = 256 * MIB  # for agents' caches; with less, a node does not start

# Control plane
CONTROL_BYTES_MAX: Final = (
    MANIFEST_BYTES_MAX + 16 * MIB
)  # a manifest with its ticket, also over HTTP
CONTROL_TIMEOUT_S: Final = 10.0
HEARTBEAT_S: Final = 1.0
TERM_MAX: Final = 1 << 27  # of routers; each has 2^21 epochs below EPOCH_MAX
TERM_LEASE_S: Final = 3.0  # without renewal, another router may get the next term
TERM_LEASE_S_MAX: Final = 60.0  # of a voter's promise to one router
ROUTER_NAME_CHARS_MAX: Final = 128  # of one run of a router's process
VOTERS_MAX: Final = 64  # voters besides the nodes
URL_CHARS_MAX: Final = 512  # of a router's own address

# Erasures
TOMBSTONES_MAX: Final = 16_384  # 3 MB in memory; 1.6 MB when sent to a node that was unreachable
ERASED_S_MAX: Final = float(1 << 53)  # beyond any date
EPOCH_ERASED_MAX: Final = (1 << 53) - 1  # exact in JSON; 2^28 erasures of one name above EPOCH_MAX

# Histories of agents' turns
TURN_HISTORY_MAX: Final = 64  # of one agent, in its record: about 14 KB
TURN_REASON_CHARS_MAX: Final = 200
TURN_LINE_CHARS_MAX: Final = 2 * KIB
TURNS_CHARS_MAX: Final = TURN_HISTORY_MAX * TURN_LINE_CHARS_MAX

# Ends of a node's process, as its next one reports them
EXIT_LINES_MAX: Final = 20  # of its log
EXIT_LINE_CHARS_MAX: Final = 240

# Data plane
FRAME_BYTES_MAX: Final = 1 * MIB
TICKET_BLOCKS_MAX: Final = 1 << 16
TRANSFER_SLICE_BYTES_MAX: Final = 2 * MIB  # lost if a connection breaks, as its MAC comes last
HANDSHAKE_TIMEOUT_S: Final = 5.0

# Copies of agents
HEAD_TOKENS_MAX: Final = 1 << 19  # of a prompt, requested from another node: 300 KB of refs
HEAD_POLL_S_MAX: Final = 1.0  # wait of an answer until a turn has published more
COPY_TIMEOUT_S: Final = 3_600.0  # of one agent; 50 GB over Wi-Fi take half of it
REPLICAS_MAX: Final = 7  # of one agent; a fabric is two to eight Macs
NODES_MAX: Final = 1_024  # of one fabric
PREFIX_SEEDING_TIMEOUT_S: Final = 300.0  # of one node, from all its peers
PREFETCH_TIMEOUT_S: Final = 120.0

# Links
PEERS_MAX: Final = 64  # peers to which a node measures links; the router names the nearest
ADDRESSES_MAX: Final = 16  # of one node
PROBE_BYTES_MAX: Final = 8 * MIB

# Router, and the fleet's events as dashboards follow them
SKETCH_PIECE_BYTES: Final = 512
SKETCH_PIECES_MAX: Final = 8_192

# Hibernation: one agent as one file
HIBERNATION_BYTES_MAX: Final = 64 * GIB  # a million tokens of an 8B model are 38 GB
HIBERNATION_FRAME_BYTES_MAX: Final = 1 * MIB  # held in memory before its signature is checked
HIBERNATION_HEADER_BYTES_MAX: Final = 4 * KIB
HIBERNATION_GRACE_S: Final = 30.0  # until a file's first bytes, sent or received; then
HIBERNATION_BYTES_PER_S_MIN: Final = 128 * KIB  # rate at which the client must send or receive
MODEL_NAME_CHARS_MAX: Final = 512
EPOCH_MAX: Final = 1 << 48  # of an imported record: a higher epoch could outlast every later owner


def retry_wait_s(wait_s: float, wait_s_max: float = RETRY_AFTER_S_MAX) -> float:
    """Return an expected wait within the bounds of Retry-After."""
    return min(max(wait_s, RETRY_AFTER_S_MIN), wait_s_max)
