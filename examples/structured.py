"""Answers in a given form: a JSON schema, a choice, and a ranking.

    python examples/structured.py CHECKPOINT

Needs the extra `grammar`. The form holds whatever the model is; sense needs a good one.
"""

import json
import sys

import lily

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "music", "rain"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def main() -> None:
    ask = [{"role": "user", "content": "Describe a person as JSON: name, age, likes."}]
    with lily.Model.load(sys.argv[1]) as model:
        # Thinking before the answer stays free.
        result = model.chat(ask, format=SCHEMA, thinking=50, max_tokens=300, seed=1).result()
        if result.finish_reason == "length":
            sys.exit("cut off before the JSON was complete")
        person = json.loads(result.content)
        print(f"{person['name']!r}, {person['age']}, likes {person['likes']}")

        vote = [{"role": "user", "content": f"Does {person['name']} like tea?"}]
        reply = model.chat(vote, format=lily.Regex("yes|no"), thinking=False, logprobs=2)
        first = (reply.result().logprobs or ())[0]
        print(f"{reply.text()}, beginning with {first.text!r} at {first.logprob:.2f}")

        for ranked in model.rank("It was late in the", [" evening", " afternoon", " orange"]):
            print(f"{ranked.choice!r} {ranked.total:.2f}")


if __name__ == "__main__":
    main()
