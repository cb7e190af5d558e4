"""A conversation in which neighbours of one role are one message, as chat templates want it."""

from dataclasses import dataclass, field, replace

from fabric.turn.messages import Message, MessageRole


@dataclass(slots=True)
class JoinedMessages:
    """Messages in order; `between` separates texts of users and systems that are joined."""

    between: str
    messages: list[Message] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Append a message, or add it to the one before of the same role."""
        last = self.messages[-1] if self.messages else None
        if message.role is MessageRole.SYSTEM and not any(message.texts):
            return  # it would be a message that says nothing
        if last is None or last.role is not message.role or message.role is MessageRole.TOOL:
            self.messages.append(message)
            return
        texts = [text for text in (*last.texts, *message.texts) if text]
        if message.role is not MessageRole.ASSISTANT:  # whose parts follow on each other
            texts = [self.between.join(texts)]
        thoughts = [each for each in (last.reasoning, message.reasoning) if each]
        self.messages[-1] = replace(
            last,
            texts=tuple(texts),
            uses=last.uses + message.uses,
            reasoning="".join(thoughts) or None,
        )
