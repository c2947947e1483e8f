"""Makes the embedded model: `python -m training.export --packages DIR --run DIR --out DIR`.

Quantises a run's parameters to int8, measures the result on the held-out books beside a Kneser-Ney
trigram over the same tokens, and writes checkpoint, tokenizer and report into the model directory.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece

from grok1_backend.checkpoint.released import save_parameters
from grok1_backend.model.config import GrokConfig
from grok1_backend.model.parameters import leaves
from grok1_backend.model.quantization import quantize
from training.corpus import Book, load_corpus
from training.evaluation import ModelScorer, bits_of_stream
from training.kneser_ney import KneserNeyTrigram
from training.objective import Params, StoredParams
from training.settings import SEED, TOKENS_PER_STEP, model_config
from training.tokenizer import EOS, Tokens, encode_books

REPORT_FILE = "training_report.json"


def quantize_params(params: Params, config: GrokConfig) -> StoredParams:
    """The parameters as they are stored: experts and projections int8, the rest float32."""
    quantized = {leaf.name for leaf in leaves(config) if leaf.quantized}
    return {
        path: {
            name: quantize(value) if f"{path}/{name}" in quantized else value
            for name, value in module.items()
        }
        for path, module in params.items()
    }


def bits_per_byte(
    books: Sequence[Book], encode: Callable[[Book], Tokens], bits: Callable[[Tokens], float]
) -> dict[str, float]:
    """Bits per UTF-8 byte of each book, and of all together (`total`). A book's end counts too."""
    used = {book.name: bits(encode(book)) for book in books}
    sizes = {book.name: len(book.text.encode()) for book in books}
    rates = {name: used[name] / sizes[name] for name in used}
    rates["total"] = sum(used.values()) / sum(sizes.values())
    return {name: round(rate, 4) for name, rate in rates.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder of package files")
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="model directory to write into")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    corpus, config = load_corpus(args.packages), model_config()
    params, state, seconds = pickle.loads((args.run / "state.pickle").read_bytes())
    params = jax.tree.map(jnp.asarray, params)
    stored = quantize_params(params, config)
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.out / "ckpt-0", ignore_errors=True)
    save_parameters(args.out / "ckpt-0", stored)
    shutil.copyfile(args.run / "tokenizer.model", args.out / "tokenizer.model")

    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(args.out / "tokenizer.model"))
    stream = encode_books(tokenizer, corpus.training)
    trigram, scorer = KneserNeyTrigram(stream, config.vocab_size), ModelScorer(config)

    def encode(book: Book) -> Tokens:
        return encode_books(tokenizer, [book])

    def trigram_bits(tokens: Tokens) -> float:
        # In the training stream, too, a book's beginning comes after another's end.
        return float(np.sum(trigram.bits(np.concatenate([[np.int32(EOS)], tokens]))))

    books = corpus.held_out
    report = {
        "held_out_bits_per_byte": {
            "model_int8": bits_per_byte(
                books, encode, lambda tokens: bits_of_stream(scorer, stored, tokens)
            ),
            "model_float32": bits_per_byte(
                books, encode, lambda tokens: bits_of_stream(scorer, params, tokens)
            ),
            "kneser_ney_trigram": bits_per_byte(books, encode, trigram_bits),
        },
        "held_out_bytes": sum(len(book.text.encode()) for book in books),
        "held_out_tokens": sum(len(encode(book)) - 1 for book in books),
        "training_bytes": sum(len(book.text.encode()) for book in corpus.training),
        "training_tokens": len(stream),
        "tokens_seen": int(state.step) * TOKENS_PER_STEP,
        "steps": int(state.step),
        "seconds": round(seconds),
        "seed": SEED,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "checkpoint_bytes": sum(file.stat().st_size for file in (args.out / "ckpt-0").iterdir()),
        "jax": jax.__version__,
    }
    (args.out / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
