"""Everything that touches MLX or mlx-lm; nothing outside this package imports them."""

from fabric.open_files import limits_kept

# mlx-lm sets the limit of open files to 2,048, at most 4,096, and fails under a lower hard limit.
with limits_kept():
    import mlx_lm.utils  # noqa: F401
