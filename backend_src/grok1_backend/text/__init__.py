"""Tokenizer, byte-exact detokenizer and stop strings. Knows nothing of JAX or Triton."""
