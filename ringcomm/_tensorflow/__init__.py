"""What ``ringcomm.tensorflow`` and ``ringcomm.keras`` share: collectives in TensorFlow, and gradients."""
