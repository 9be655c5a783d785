"""The items that a rank takes, and the loaders that provide them."""
