"""The on-disk formats: the released checkpoint's pickles and sharded safetensors."""
