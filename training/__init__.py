"""Makes the embedded model: corpus, tokenizer, Kneser-Ney baseline, training (see README.md)."""
