"""The model calls Python functions.

    python examples/tools.py CHECKPOINT "What will the weather be in Oslo?"

A function's type hints and docstring tell the model what it does and what it takes.
"""

import sys
from typing import Literal

import lily


def weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> dict[str, object]:
    """The weather of the present hour.

    Args:
        city: name of a city.
        unit: of the temperature.
    """
    return {"city": city, "temperature": 12 if unit == "celsius" else 54, "sky": "clear"}


def lamp(on: bool, colour: Literal["white", "red", "green"] = "white") -> str:
    """Switch the lamp in the hall."""
    return f"the lamp is {colour if on else 'off'}"


def main() -> None:
    question = sys.argv[2] if len(sys.argv) > 2 else "What will the weather be in Oslo?"
    ask = [{"role": "user", "content": question}]

    with lily.Model.load(sys.argv[1]) as model:
        # Ask, call what the model asks for, tell it the results, and ask again.
        run = model.run_tools(ask, [weather, lamp], max_rounds=4, max_tokens=400, thinking=100)
        for reply in run.replies:
            for call in reply.tool_calls:
                print(f"called {call.name} with {call.arguments}")
        print(f"answer: {run.result.content}")

        # One call, by hand; a grammar holds the model to it.
        switch = [{"role": "user", "content": "Make the hall green."}]
        reply = model.chat(
            switch, tools=[lamp], tool_choice="lamp", parallel_tool_calls=False, thinking=False
        ).result()
        for call in reply.tool_calls:
            print(f"lamp({call.arguments_json}) says: {lamp(**call.arguments)}")


if __name__ == "__main__":
    main()
