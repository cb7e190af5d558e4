"""OpenAI's Responses API: requests, items, streams of events, stored responses."""
