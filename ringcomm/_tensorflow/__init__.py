"""Code shared by ``ringcomm.tensorflow`` and ``ringcomm.keras``: collectives and gradient reduction."""
