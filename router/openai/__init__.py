"""The OpenAI dialect: requests, answers, streams."""
