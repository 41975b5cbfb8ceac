"""Warnings, once per method: a draft that is hardly ever accepted, a memory used far beyond its trained length.

Counts what records say; knows no models. Both are signs of a mistake that no error could catch, since the output is
right whatever the draft does.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from lightning.pytorch.utilities import rank_zero_warn

from callbacks.methods import Contender
from callbacks.predictions import Prediction

# Accepted less often than this over so many iterations: a draft that knew the language at all would do better.
HOPELESS_RATE, HOPELESS_ITERATIONS = 0.02, 100
FAR_BEYOND = 2  # times the trained length


@dataclass
class Alarms:
    """The names are what a warning says of the run: `target`, `draft`, `tokenizer`."""

    num_draft_tokens: int
    target: str
    draft: str
    tokenizer: str
    _iterations: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _accepted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _given: set[tuple[str, str]] = field(default_factory=set)

    def before(self, contender: Contender, prompt_tokens: int) -> None:
        """A memory trained at one length is about to read much more."""
        length = contender.trained_length
        if length and prompt_tokens > FAR_BEYOND * length:
            self._warn(
                "length",
                contender.name,
                f"its memory was trained on texts of {length} tokens and now reads {prompt_tokens}: acceptance may be "
                "lower than at the trained length.",
            )

    def after(self, contender: Contender, record: Prediction) -> None:
        """Next to nothing has been accepted for long."""
        name = contender.name
        self._iterations[name] += record.iterations
        self._accepted[name] += sum(record.accepted)
        iterations, accepted = self._iterations[name], self._accepted[name]
        drafted = iterations * self.num_draft_tokens
        if contender.policy is not None and iterations >= HOPELESS_ITERATIONS and accepted < HOPELESS_RATE * drafted:
            ratio = f", memory ratio {contender.ratio}" if contender.ratio else ""
            self._warn(
                "acceptance",
                name,
                f"{accepted} of {drafted} drafted tokens were accepted in {iterations} iterations (target "
                f"{self.target}, draft {self.draft}, tokenizer {self.tokenizer}{ratio}): check that draft and target "
                "belong together and that the draft is trained.",
            )

    def _warn(self, kind: str, name: str, text: str) -> None:
        if (kind, name) not in self._given:
            self._given.add((kind, name))
            rank_zero_warn(f"method '{name}': {text}")
