"""Makes the embedded model of a training run: `python -m training.export --packages DIR --run DIR`.

Quantises the parameters to int8, measures the result on the held-out books beside a Kneser-Ney
trigram over the same tokens, and writes checkpoint, tokenizer and report.
"""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sentencepiece

from grok1_backend.model.quantization import QuantizedWeight8bit, quantize
from training.corpus import Book, Corpus, load_corpus
from training.evaluation import ModelScorer, bits_of_stream
from training.kneser_ney import KneserNeyTrigram
from training.objective import Params
from training.settings import model_config
from training.tokenizer import BOS, encode_books

