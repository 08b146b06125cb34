"""A model's weights in a store: where they come from, how they are laid out, and how the store is built."""
