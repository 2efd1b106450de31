"""A program whose processes Lightning starts, with its own strategy "ddp"."""

from __future__ import annotations

import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ringcomm.torch.distributed


class Model(lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        """The loss of one batch."""
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        """Gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Train on two processes."""
    ringcomm.torch.distributed.make_default()
    trainer = lightning.Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4))
    print(f"rank {trainer.global_rank} of {dist.get_world_size()} over {dist.get_backend()}", flush=True)
    trainer.strategy.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
