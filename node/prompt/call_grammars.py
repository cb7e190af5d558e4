"""The grammar of one request's tool calls, in the format of the node's model."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from fabric.codec import dump_json
from fabric.errors import RejectedError
from fabric.turn.call_choice import CallChoice
from fabric.turn.output_format import check_schema
from node.dialect.tool_schema import ToolSpec, callable_tools, tool_refusal
from node.grammar.compiler import Compiler, Grammar
from node.limits import CALL_SCHEMAS_BYTES_MAX
from node.mlx.chat_tokenizer import ChatTokenizer

# "at 4(5): …", and the number of the line that the compiler quotes next.
_PLACE = re.compile(r"^at \d+\(\d+\): |\s+\d+$")


@dataclass(frozen=True, slots=True)
class CallGrammars:
    """Builds grammars of tool calls; thread-safe."""

    compiler: Compiler
    tokenizer: ChatTokenizer
    tools: list[Any] | None = field(repr=False)
    choice: CallChoice

    def key(self) -> str:
        """Return what the grammar depends on; raise RejectedError for unenforceable tools."""
        spelled = [
            [tool.name, tool.parameters, tool.is_strict, tool.rules] for tool in self._offered()
        ]
        choice = self.choice
        return f"calls {choice.takes_one} {choice.must_call} {dump_json(spelled).decode()}"

    def compile(self) -> Grammar:
        """Compile the grammar; raise RejectedError naming the tool whose schema is invalid."""
        offered = self._offered()
        try:
            return self._compiled(offered)
        except RejectedError:
            # One by one, to name the tool at fault and to loosen those that are not strict.
            return self._compiled(tuple(self._tried(tool) for tool in offered))

    def _offered(self) -> tuple[ToolSpec, ...]:
        offered = callable_tools(self.tools, self.choice)
        if not offered:
            message = "tool_choice asks for a call, but the request has no tool to call"
            raise RejectedError(message, code="invalid_value", param="tool_choice")
        size_bytes = sum(len(dump_json(t.parameters)) + len(t.rules) for t in offered)
        if size_bytes > CALL_SCHEMAS_BYTES_MAX:
            message = f"the schemas of all tools exceed {CALL_SCHEMAS_BYTES_MAX} bytes"
            raise RejectedError(message, code="invalid_function_parameters", param="tools")
        return tuple(self._checked(tool) for tool in offered)

    def _checked(self, tool: ToolSpec) -> ToolSpec:
        try:
            check_schema(tool.parameters)
        except RejectedError as error:
            return self._loosened(tool, error)
        return tool

    def _tried(self, tool: ToolSpec) -> ToolSpec:
        try:
            self._compiled((tool,))
        except RejectedError as error:
            return self._loosened(tool, error)
        return tool

    def _loosened(self, tool: ToolSpec, error: RejectedError) -> ToolSpec:
        """Allow any object as the arguments of a tool that need not be strict."""
        if tool.is_strict or self.choice.must_call:
            if error.param in ("tools", "tool_choice"):
                raise error
            raise tool_refusal(tool.name, _reason(error)) from None
        return replace(tool, parameters={"type": "object"})

    def _compiled(self, offered: tuple[ToolSpec, ...]) -> Grammar:
        expression = self.tokenizer.call_grammar(offered, self.choice)
        return self.compiler.compile_expression(expression)


def _reason(error: RejectedError) -> str:
    """Return an error's reason without its place in our grammar, which clients never see."""
    reason = error.message.partition(": ")[2]
    return _PLACE.sub("", reason.partition(" | ")[0]).strip()
