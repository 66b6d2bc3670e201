"""The verdict on one comparison, as files store it. This module does not need JAX."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["supported", "contradicted", "not settled", "not tested"]

FEWEST = 5
"""The fewest samples from which the number of needed seeds is computed."""


class Schema(BaseModel):
    """A frozen part of a file, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(Schema):
    """One comparison within a claim, for example with one of six methods.

    Attributes:
      name: the name of the comparison, empty if the claim has only one.
      verdict: the verdict on this comparison alone.
      evidence: the numbers, as text.
      margin: the limit of the comparison, such as "above 0".
      seeds: the number of samples, if the quantity is random.
      needed: the seeds that would settle the comparison if the mean and the spread stay the same,
        or None if there are too many of them, or too few samples to tell.
      leans: the side of the margin on which the mean lies, by more than one standard error, or
        empty.
    """

    name: str
    verdict: Any
    evidence: str
    margin: str = ""
    seeds: int | None = None
    needed: int | None = None
    leans: Literal["", "for", "against"] = ""
