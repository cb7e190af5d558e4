"""Everything that touches MLX or mlx-lm; nothing outside this package imports them."""

from fabric.hosting.process import keep_resource_limits

# mlx-lm sets the limit of open files to 2,048, at most 4,096, and fails under a lower hard limit.
with keep_resource_limits():
    import mlx_lm.utils  # noqa: F401
