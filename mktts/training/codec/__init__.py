"""Training of the codec: encoder and quantiser, which only training needs, and the decoder of a checkpoint."""
