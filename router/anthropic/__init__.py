"""The Anthropic dialect: requests, answers, streams, token counts."""
