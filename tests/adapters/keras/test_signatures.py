"""All of ``horovod.keras`` and ``horovod.tensorflow.keras`` is here and takes the same parameters."""

from __future__ import annotations

from tests.adapters.signatures import differences, differences_of_options

LIKE_HOROVODS = """
init(comm=None, process_sets=None)
start_timeline(file_path, mark_cycles=False)
DistributedOptimizer(optimizer, name=None, device_dense=, device_sparse=, compression=none, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=global, scale_local_gradients=True)
load_model(filepath, custom_optimizers=None, custom_objects=None, compression=none, legacy_opts=False)
allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None)
allgather(value, name=None)
broadcast(value, root_rank, name=None)
reducescatter(value, name=None, op=Average)
callbacks.BroadcastGlobalVariablesCallback(root_rank, device=, local_variables=None)
callbacks.MetricAverageCallback(device=)
callbacks.LearningRateScheduleCallback(initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None)
callbacks.LearningRateWarmupCallback(initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0)
callbacks.BestModelCheckpoint(monitor=val_loss, verbose=0, mode=auto, save_freq=epoch)
elastic.run(func)
elastic.KerasState(model, optimizer=None)
elastic.CommitStateCallback(state, batches_per_commit=1)
elastic.UpdateBatchStateCallback(state)
elastic.UpdateEpochStateCallback(state)
"""  # noqa: E501


def test_signatures() -> None:
    import ringcomm.keras
    import ringcomm.tensorflow.keras

    assert differences(ringcomm.keras, LIKE_HOROVODS) == []
    assert differences(ringcomm.tensorflow.keras, LIKE_HOROVODS) == []
    assert differences_of_options(ringcomm.keras, "ringcomm.keras") == []
    assert differences_of_options(ringcomm.tensorflow.keras, "ringcomm.keras") == []
