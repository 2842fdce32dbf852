"""The demo model's text: a tokenizer of its own, and what the training reads.

    python examples/demo_model/prose.py BOOKS.txt OUT

trains a byte-level BPE on the prose and writes tokenizer, chat template and generation settings
to the folder OUT, in the family's form.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

sys.path.append(str(Path(__file__).resolve().parent.parent))
from text_files import SPECIAL, SPLIT, TAGS, Text, byte_tokens

VOCABULARY = 4096
PADDING = 15  # rows of the embedding above the last token, as the released model has them

BLOCK = 20_000  # characters; every 25th block is for validation
EVERY = 25


def read(path: Path) -> str:
    """The prose, without the faults of its scan: here and there a line holds its text twice."""
    lines = path.read_text(encoding="utf-8").split("\n")
    halves = ((line, len(line) // 2) for line in lines)
    return "\n".join(line[:n] if n > 20 and line[:n] == line[n:] else line for line, n in halves)


def split(text: str) -> tuple[list[str], list[str]]:
    """Training and validation blocks, cut at line ends."""
    blocks, at = [], 0
    while at < len(text):
        end = text.find("\n", at + BLOCK) + 1 or len(text)
        blocks.append(text[at:end])
        at = end
    held = [b for i, b in enumerate(blocks) if i % EVERY == EVERY // 2]
    return [b for i, b in enumerate(blocks) if i % EVERY != EVERY // 2], held


def learn_vocabulary(blocks: list[str]) -> Text:
    """Merges learned from `blocks`; ids of bytes and merges as the family's files order them."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - PADDING - len(SPECIAL + TAGS),
        initial_alphabet=sorted(byte_tokens()),
        show_progress=False,
    )
    learner.train_from_iterator(blocks, trainer)
    merges = [" ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    return Text(byte_tokens() + [merge.replace(" ", "") for merge in merges], merges)


# --- What the training reads ----------------------------------------------------------------------

SENTENCE_END = re.compile(r"[.!?][\"'”’)]*\s")
NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-zé]{3,}")


@cache
def sentences(text: str) -> list[str]:
    """`text` without its line ends, cut into sentences."""
    flat = " ".join(text.split())
    cuts = [0, *(m.end() for m in SENTENCE_END.finditer(flat)), len(flat)]
    return [flat[a:b].strip() for a, b in pairwise(cuts) if b - a > 1]


def thought(reply: str) -> str:
    """What the model is to think before a reply: who is in it."""
    names = list(dict.fromkeys(NAME.findall(reply)))[:3]
    if not names:
        return "Let me go on with the story."
    who = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return f"Let me go on with the story. It is about {who}."


def conversations(blocks: list[str], rng: random.Random) -> Iterator[str]:
    """Endless chats in which every turn goes on with the story, half of them with a thought."""
    while True:
        parts = sentences(rng.choice(blocks))
        at = rng.randrange(max(1, len(parts) - 12))
        text = ""
        for _ in range(rng.choice((1, 1, 2, 3))):
            asked, told = rng.choice((1, 1, 2)), rng.randint(2, 9)
            user = " ".join(parts[at : at + asked])
            reply = " ".join(parts[at + asked : at + asked + told])
            if not user or not reply:
                break
            at += asked + told
            # As the template writes it, only the last turn keeps its thinking block.
            text = re.sub(r"<think>.*?</think>\n\n", "", text, flags=re.DOTALL)
            think = f"{thought(reply)}\n" if rng.random() < 0.5 else "\n"
            text += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
            text += f"<think>\n{think}</think>\n\n{reply}<|im_end|>\n"
        if text:
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    blocks, _ = split(read(args.books))
    args.out.mkdir(parents=True, exist_ok=True)
    learn_vocabulary(blocks).write(args.out, temperature=0.8, top_k=40)


if __name__ == "__main__":
    main()
