"""Teach a small neural network to read handwritten digits, with the Hugging Face Trainer over ringcomm.

It is an ordinary program for the Trainer; only the lines marked with "<---" are about ringcomm. The images
are part of scikit-learn; nothing is downloaded.
"""

import argparse
import hashlib
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification
except ModuleNotFoundError as missing:
    package = {"sklearn": "scikit-learn"}.get(missing.name, missing.name)
    raise SystemExit(
        f"This example needs {package}, which is missing here. "
        f"Install it: {sys.executable} -m pip install {package}"
    ) from None

import ringcomm.torch.distributed

VALIDATION = 357  # images that are kept back, to see what the network makes of ones it never saw


def digits():
    """The images to learn from, and those that are kept back; the same on all ranks."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy((images / 16).astype("float32")), torch.from_numpy(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    training = TensorDataset(images[VALIDATION:], labels[VALIDATION:])
    return training, TensorDataset(images[:VALIDATION], labels[:VALIDATION])


def report(model, rank, size, reached):
    """Print a digest of this rank's weights, and on rank 0 the accuracy."""
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print(f"rank {rank}: weights have digest {hashlib.sha256(weights).hexdigest()[:16]}")
    if rank == 0:
        print(f"{size} process(es) over {dist.get_backend()}; final accuracy {reached:.4f}")


def collate(rows):
    """A batch under the names that the model expects."""
    images, labels = zip(*rows)
    return {"pixel_values": torch.stack(images).reshape(-1, 1, 8, 8), "labels": torch.stack(labels)}


def accuracy(prediction):
    """The share of images that are read correctly."""
    return {"accuracy": float((prediction.predictions.argmax(axis=1) == prediction.label_ids).mean())}


def main():
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="how often to go through all images [10]")
    add("--lr", type=float, default=0.002, help="learning rate [0.002]")
    add("--batch-size", type=int, default=32, help="images per step and process [32]")
    args = parser.parse_args()

    ringcomm.torch.distributed.init()  # <--- joins the other processes
    training, held_back = digits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=args.epochs, learning_rate=args.lr, seed=1,
            per_device_train_batch_size=args.batch_size, per_device_eval_batch_size=args.batch_size,
            ddp_find_unused_parameters=False,
            use_cpu=True,  # <--- without it, every process would train alone
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        torch.manual_seed(1)
        config = ViTConfig(
            image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=64,
        )  # fmt: skip
        model = ViTForImageClassification(config)
        trainer = Trainer(
            model, arguments, data_collator=collate, train_dataset=training, eval_dataset=held_back,
            compute_metrics=accuracy,
        )  # fmt: skip
        trainer.train()
        reached = trainer.evaluate()["eval_accuracy"]
    report(model, arguments.process_index, arguments.world_size, reached)


if __name__ == "__main__":
    main()
