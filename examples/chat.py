"""A chat; of each prompt only what is new is computed.

    python examples/chat.py CHECKPOINT

Type a line and get an answer; an empty line or Ctrl-D ends the chat.
"""

import sys
from typing import Any

import lily


def main() -> None:
    with lily.Model.load(sys.argv[1]) as model:
        messages: list[dict[str, Any]] = []
        for line in sys.stdin:
            if not line.strip():
                break
            messages.append({"role": "user", "content": line.strip()})

            # At most 100 tokens of thinking, so that an answer comes soon.
            reply = model.chat(messages, thinking=100, max_tokens=200)
            answering = False
            for piece in reply:
                if piece.content and not answering:
                    print("\n--")
                    answering = True
                print(piece.reasoning or piece.content, end="", flush=True)

            result = reply.result()
            messages.append(result.message())
            usage = result.usage
            print(f"\n[{usage.prompt} tokens of prompt, {usage.reused} of them reused]")


if __name__ == "__main__":
    main()
