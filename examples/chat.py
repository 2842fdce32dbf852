"""A chat in one session: each answer computes only what is new of the conversation.

    python examples/chat.py CHECKPOINT

Type a line and get an answer; an empty line or Ctrl-D ends the chat.
"""

import sys

import lily


def main() -> None:
    with lily.Model.load(sys.argv[1]) as model, model.session() as session:
        messages: list[dict[str, str]] = []
        for line in sys.stdin:
            if not line.strip():
                break
            messages.append({"role": "user", "content": line.strip()})
            answer = session.generate(messages, max_tokens=100, thinking=False)
            for piece in answer:
                print(piece.text, end="", flush=True)
            result = answer.result()
            messages.append({"role": "assistant", "content": result.text})
            usage = result.usage
            print(f"\n[{usage.prompt} tokens of prompt, {usage.reused} of them reused]")


if __name__ == "__main__":
    main()
