"""Sessions step by step: logits, snapshots, forks.

    python examples/sessions.py CHECKPOINT

A session is one sequence of tokens with the state that the model keeps of it.
"""

import sys

import numpy as np

import lily


def main() -> None:
    with lily.Model.load(sys.argv[1]) as model:
        session = model.session(context=4096)

        logits = session.prefill(model.encode("The three colours are"))
        for token, log_probability in logits.top(3):
            print(f"token {token} has probability {np.exp(log_probability):.3f}")

        # One step at a time: the logits after each token are yours to use.
        kept = session.snapshot()
        before = np.asarray(logits)
        for _ in range(5):
            logits = session.decode(logits.argmax())
        print(f"position after five steps: {session.position}")

        # Back to the snapshot, exactly.
        session.restore(kept)
        same = session.logits is not None and np.array_equal(session.logits, before)
        print(f"after restore: {'the same' if same else 'other'} logits")

        # Two continuations of one beginning; the beginning is computed once.
        other = session.fork()
        for name, timeline, seed in (("first", session, 1), ("second", other, 2)):
            stream = timeline.stream(20, lily.Sampling(temperature=1.0, seed=seed))
            print(f"{name}: {''.join(piece.text for piece in stream)!r}")


if __name__ == "__main__":
    main()
