"""How many bytes are reduced together, and how the sizes compose.

From a gradient to the network, in this order:

1. An adapter puts gradients side by side in buckets, in the order in which a backward pass computes them.
   The first bucket has :data:`FIRST_GRADIENTS_BYTES`, so that its reduction starts early; the others have
   :data:`GRADIENTS_BYTES`. A bucket is one operation.
2. Rank 0 fuses the operations that are ready on all ranks, buckets and single tensors alike, up to
   :data:`FUSION_BYTES` (``--fusion-threshold``). Buckets of step 1 are fused only if several are ready at
   once: on a slow network.
3. Each rank copies the fused tensors below :data:`ALONE_BYTES` side by side. Larger ones are reduced one by
   one, in place: the copies would cost more than a call.

PyTorch's process group reduces several tensors at once without rank 0: those up to :data:`LISTED_BYTES` side
by side, the others one by one.

So the engine never copies a tensor of :data:`ALONE_BYTES`, nor a full bucket of step 1.
"""

FIRST_GRADIENTS_BYTES = 1 << 20
GRADIENTS_BYTES = 8 << 20
FUSION_BYTES = 64 << 20
ALONE_BYTES = 1 << 20
LISTED_BYTES = 256 << 10
