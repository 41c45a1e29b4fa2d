"""Runtimes in processes of their own, some in a Python whose packages can't live beside ours.

`python workers RUNTIME REQUEST ANSWER` (see `__main__`) loads `RUNTIME_worker.py` beside it and
answers a request in JSON by JSON. Nothing here may import draftsmith, nor anything but the standard
library, numpy and the runtime: what runs it may have nothing else. A worker has

- `VERSION`: the runtime's name and version,
- `read(path, questions)`: a drafter that was exported, asked `parity.Questions`; returns `logits`
  (numpy, [T, V]), `greedy` and `strings`, each None where the runtime can't tell,
- `Pair(target, drafter, lookaheads, max_new_tokens, stop_ids, threads)`: both loaded; its
  `generate(prompt, lookahead)` writes the greedy text after some ids, with lookahead 0 by the
  target alone. It returns `tokens` (up to the limit or a stop id, which is included), `seconds` (of
  the whole answer, prompt included), `drafted`, `accepted` (None for the target alone, or where the
  runtime does not count) and `passes` (of the target; None where it does not tell).

Only what a format or runtime supports must be there.
"""
