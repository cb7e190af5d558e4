"""A tokenizer of one token per character, with ChatTokenizer's interface.

Roles and ends are single characters that never occur in a message, and the only ones where a
prompt may be cut.
"""

from types import MappingProxyType, SimpleNamespace

from fabric.turn.control_marks import ControlMarks
from fabric.turn.prompt_plan import Encoded
from node.dialect.folding import Rendered
from node.dialect.formats import AnswerFormat
from node.dialect.marked_reader import MarkedReader
from tests.sim.model import END

ROLES = {"system": "\x01", "user": "\x02", "assistant": "\x03", "tool": "\x05"}
_END = chr(END)
CUT_TEXTS = {ord(text): text.encode() for text in (*ROLES.values(), _END)}


def render(messages, *, opens_answer=True):
    """Return the prompt of a conversation, up to where the model answers."""
    text = "".join(f"{ROLES[m['role']]}{m['content']}{_END}" for m in messages)
    return text + ROLES["assistant"] * opens_answer


class _Detokenizer:
    def __init__(self):
        self.last_segment = ""
        self.tokens = []

    def add_token(self, token):
        self.last_segment = chr(token)

    def finalize(self):
        self.last_segment = ""


class _Wrapper:
    """The part of mlx-lm's tokenizer that `Answer` uses."""

    @property
    def detokenizer(self):
        return _Detokenizer()


class SimTokenizer:
    """A tokenizer with characters as tokens."""

    wrapper = _Wrapper()
    warning = None  # of its template
    eos_ids = frozenset({END})
    cut_texts = CUT_TEXTS
    markup_ids = frozenset(CUT_TEXTS)
    special_texts = {token: text.decode() for token, text in CUT_TEXTS.items()}  # noqa: RUF012
    control_marks = ControlMarks({text: token for token, text in special_texts.items()})
    template = SimpleNamespace(exists=True)
    reach_bytes = 4
    default_options = MappingProxyType({})

    def render(self, messages, tools, options, *, opens_answer=True):
        return render(messages, opens_answer=opens_answer)

    def rendered(self, messages, tools, options, *, continues=False):
        assert not continues, "no simulated client begins answers"
        return Rendered(render(messages))

    def reader(self, prompt, stop, tools, call_seed, choice):
        return self.plain_reader(stop)

    def plain_reader(self, stop):
        return MarkedReader(AnswerFormat(), stop, None, "")

    def encode(self, text, *, special_prefix=False, limit=None, plain=()):
        if limit is not None:
            limit.check(len(text))
        return Encoded([ord(char) for char in text], list(range(1, len(text) + 1)))

    def token_text(self, token):
        return chr(token)
