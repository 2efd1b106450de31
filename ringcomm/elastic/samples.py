"""The sampler of elastic training, without a framework: PyTorch's and Keras' are made from it."""

from __future__ import annotations

import random
from typing import Any, Dict, Iterator, List, Sized, Union

from .. import api


class ElasticSampler:
    """Distributes samples over the ranks, and redistributes the remaining ones when the ranks change.

    Make it an attribute of an elastic state, call :meth:`record_batch` after each batch and before the
    commit, and :meth:`set_epoch` at the end of each epoch. Then every sample of an epoch is processed once,
    whatever ranks are lost or join meanwhile: batches after the last commit are repeated after a loss, and
    their results are dropped. All ranks get the same number of samples, so some of the first remaining ones
    are repeated at the end of an epoch if they cannot be divided.

    Example::

        sampler = hvd.elastic.ElasticSampler(len(images))
        state = hvd.elastic.KerasState(model, sampler=sampler)
        for start in range(0, len(sampler), 32):
            chosen = sampler.indices[start : start + 32]
            train_on(images[chosen])
            sampler.record_batch(start // 32, len(chosen))
            state.commit()

    Args:
        dataset: the data set, or its number of samples, which must not change.
        shuffle: whether to shuffle, in a different order each epoch.
        seed: of the shuffling; the same on all ranks.

    Attributes:
        epoch: the index of the epoch.
        processed_num: number of samples of this epoch that all ranks together have processed.
        indices: the indices of the samples that remain for this rank, since the last :meth:`reset`.
        remaining_indices: those that remain for all ranks.
        num_replicas: number of ranks.
        rank: this process's rank.
    """

    def __init__(self, dataset: Union[Sized, int], shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, with all samples.

        Args:
            epoch: its index.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch.

        Args:
            batch_idx: its index; not used.
            batch_size: its number of samples on each rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> Dict[str, Any]:
        """The epoch, and the number of samples processed in it."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Continue from a state, with the current ranks.

        Args:
            state_dict: as :meth:`state_dict` returns it.
        """
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that have not been processed over the current ranks."""
        self.num_replicas, self.rank = api.size(), api.rank()
        order = list(range(self.dataset if isinstance(self.dataset, int) else len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # Repeat some, more than once if fewer samples remain than there are ranks.
        repeated = self.remaining_indices * (1 + self.num_replicas)
        self.indices: List[int] = repeated[: self.total_size][self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
