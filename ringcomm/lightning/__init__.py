"""Strategies for PyTorch Lightning and Fabric, in the packages ``lightning`` and ``pytorch_lightning``.

    import ringcomm.lightning
    trainer = Trainer(strategy="ddp_ringcomm", accelerator="cpu")

Start the program with ``ringrun`` or ``torchrun``. ``"fsdp2_ringcomm"`` shards the model with FSDP2. Both
take the number of ranks from the job, and hosts may have unequal numbers of them.
"""

from __future__ import annotations

from ._job_ranks import RingcommEnvironment
from ._registration import register

__all__ = ["RingcommEnvironment", "register"]

register()
