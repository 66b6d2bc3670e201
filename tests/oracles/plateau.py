"""Early stopping at a plateau, as a plain loop over the records of one run."""

import math


def plateau_end(records, patience, mode, min_delta=0.0, warmup=0):
    """The first record after which no model has improved for `patience` records, or -1.

    Args:
      records: a list of all models' values for each record of a run.
      patience: as in `Until`.
      mode: as in `Until`.
      min_delta: as in `Until`.
      warmup: as in `Until`.
    """
    num_models = len(records[0])
    best, last = [None] * num_models, [warmup - 1] * num_models
    for number, values in enumerate(records):
        for model, value in enumerate(values):
            if number < warmup or math.isnan(value):
                continue
            if best[model] is None:
                gain = math.inf
            else:
                gain = best[model] - value if mode == "min" else value - best[model]
            if gain > min_delta:
                best[model], last[model] = value, number
        if all(number - each >= patience for each in last):
            return number
    return -1
