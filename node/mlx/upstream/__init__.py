"""A batched quantized cache for mlx-lm's own generator; nothing of ours imports it."""
