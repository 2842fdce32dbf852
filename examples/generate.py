"""Stream a text, then say how it went.

    python examples/generate.py CHECKPOINT "Once upon a time"

CHECKPOINT is a folder, or "org/name" on the Hugging Face hub.
"""

import sys

import lily


def main() -> None:
    folder = sys.argv[1]
    prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"

    with lily.Model.load(folder) as model:
        generation = model.generate(prompt, max_tokens=100, temperature=0.7, seed=1)
        for piece in generation:
            print(piece.text, end="", flush=True)

        result = generation.result()
        usage, timings = result.usage, result.timings
        print(f"\n\n{usage.prompt} tokens of prompt, {usage.generated} generated")
        print(f"ended by {result.finish_reason}")
        print(f"first token after {1000 * timings.first_token_s:.1f} ms")
        print(f"decode {timings.decode_tok_s:.1f} tok/s")


if __name__ == "__main__":
    main()
