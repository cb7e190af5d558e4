"""Everything that touches MLX or mlx-lm; nothing outside this package imports them."""
