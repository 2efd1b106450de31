"""Handwritten digits with the Hugging Face Trainer over ringcomm."""

import tempfile

import torch
from common import digits, options, report
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import ringcomm.torch.distributed


def collate(rows):
    """A batch under the names that the model expects."""
    images, labels = zip(*rows)
    return {"pixel_values": torch.stack(images).reshape(-1, 1, 8, 8), "labels": torch.stack(labels)}


def accuracy(prediction):
    """The share of images that are read correctly."""
    return {"accuracy": float((prediction.predictions.argmax(axis=1) == prediction.label_ids).mean())}


def main():
    args = options(lr=0.002)
    ringcomm.torch.distributed.init()  # joins the other processes
    training, held_back = digits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, num_train_epochs=args.epochs, learning_rate=args.lr, seed=1,
            per_device_train_batch_size=args.batch_size, per_device_eval_batch_size=args.batch_size,
            ddp_find_unused_parameters=False,
            use_cpu=True,  # without it, every process would train alone
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
