"""Three small models to learn from, each one file read from top to bottom.

`GPT` (causal, next token), `BERT` (both ways, hidden tokens) and `RNN` (one state carried along:
the contrast). `clearhead.models.train` trains all three; `load` reads what it saved.
"""

from clearhead.models.bert import BERT
from clearhead.models.checkpoint import is_checkpoint, load, save
from clearhead.models.generating import generate, stream
from clearhead.models.gpt import GPT
from clearhead.models.rnn import RNN
from clearhead.models.text import Characters, read_text, shipped_text

__all__ = [
    "BERT",
    "GPT",
    "RNN",
    "Characters",
    "generate",
    "is_checkpoint",
    "load",
    "read_text",
    "save",
    "shipped_text",
    "stream",
]
