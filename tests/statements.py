"""Statements of the theory, called by their symbols."""

import dataclasses
import inspect

from fedjax_mm.theory.problem import Problem, Rate

FIELDS = {field.name for field in dataclasses.fields(Problem)}


def evaluate(statement, /, **symbols):
    """Evaluates a statement, building its Problem, Rate and rates from the symbols."""
    parameters = inspect.signature(statement).parameters
    given = dict(symbols)
    if "rate" in parameters:
        given["rate"] = Rate(given.pop("beta"), given.pop("gamma"))
    if "rates" in parameters:
        given["rates"] = given.pop("eta_l"), given.pop("eta_g")
    if "problem" in parameters:
        names = given.keys() & FIELDS - parameters.keys()
        given["problem"] = Problem(**{name: given.pop(name) for name in names})
    return statement(**given)
