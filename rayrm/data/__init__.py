"""Rows: from their sources to packed batches of token ids."""
