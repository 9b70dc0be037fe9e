"""How good a network is on a data set: hits and samples, each counted once on any number of ranks."""
import dataclasses
import math

import numpy as np

from pcldnn.data import Loader


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation, over all ranks: integers, so it does not depend on the number of ranks.

    Attributes
    ----------
    count : int
        Samples evaluated, each once.
    correct1, correct5 : int
        Samples whose label has the largest logit, one of the five largest.
    """
    count: int
    correct1: int
    correct5: int

    @property
    def top1(self):
        """Share of `count`, 0..1 (NaN without samples)."""
        return self.correct1 / self.count if self.count else math.nan

    @property
    def top5(self):
        return self.correct5 / self.count if self.count else math.nan


def evaluate(network, communicator, dataset, minibatch, loader_options):
    """See `Trainer.evaluate`."""
    counts = np.zeros(3)    # samples, correct1, correct5: integers, exact in float64
    options = {name: loader_options[name] for name in ("threads", "prefetch", "skip_damaged")
               if name in loader_options}
    with Loader(dataset, minibatch, rank=communicator.rank, size=communicator.size, training=False,
                **options) as loader:
        for batch in loader.epoch(0):
            if len(batch.labels) or network.is_split:     # then all ranks work on each image
                ranking = rank_of_label(network.forward(batch.images), batch.labels)
                counts += len(ranking), (ranking < 1).sum(), (ranking < 5).sum()
    count, correct1, correct5 = (int(n) for n in communicator.allreduce_sum(counts))
    return Evaluation(count, correct1, correct5)


def rank_of_label(logits, labels):
    """How many classes come before the right one; of equal logits the first class wins, NaN never does.

    Returns
    -------
    int array (N,)
        0 is a top-1 hit, below 5 a top-5 hit.
    """
    own = logits[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(logits.shape[1]) < np.asarray(labels)[:, None]
    before = ((logits > own) | ((logits == own) & earlier)).sum(axis=1)
    return np.where(np.isfinite(own[:, 0]), before, logits.shape[1] + 5)
