"""KV cache model: its spec, blocks, their hashes and their files."""
