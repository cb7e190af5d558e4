"""What a KV cache is made of: its spec, blocks, their hashes and their files."""
